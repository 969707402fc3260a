"""Running an invariant that is not built in: behind the fence, and everything it does to the tables undone.

A user's invariant gets the same tables as the built-in ones, in a transaction that is rolled back: what it makes, fills
or empties is gone before the next one runs.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal

import duckdb
import pyarrow as pa
from duckdb import DuckDBPyRelation

from lineage.checks.catalogue import SEVERITIES, CatalogueError, Check, Invariant
from lineage.checks.profiles import Profile
from lineage.checks.workbench import Workbench
from lineage.errors import first_line
from lineage.traces import Trace, fence
from lineage.traces.fence import FenceError
from lineage.traces.interrupts import interrupted

_FINDINGS = pa.schema(
    [
        ("rid", pa.int64()),
        ("key", pa.string()),
        ("expected", pa.string()),
        ("actual", pa.string()),
        ("detail", pa.string()),
        ("severity", pa.string()),
    ]
)


@dataclass(frozen=True)
class Finding:
    """One element at fault, as a Python invariant says it.

    Attributes:
        rid: the row it is in, as in ``events``.
        key: trajectory key, uid or metric; None where the row as a whole is at fault.
        expected: what should be there; printed as text.
        actual: what is there.
        detail: what else helps.
        severity: ``error`` or ``warning``; the invariant's when None.
    """

    rid: int
    key: str | None = None
    expected: object = ""
    actual: object = ""
    detail: str | None = None
    severity: str | None = None


class Tables:
    """What a Python invariant looks at: the tables of docs/checks/README.md.

    Attributes:
        trace: the open trace: ``metadata``, ``state``, ``path``.
        profile: whose conventions the trace follows.
    """

    def __init__(self, bench: Workbench) -> None:
        self._bench = bench
        self.trace: Trace = bench.trace
        self.profile: Profile = bench.profile

    def sql(self, query: str) -> DuckDBPyRelation:
        """Run a query over the tables.

        Raises:
            FenceError: it is not a query, is not valid, or asks for something outside this trace.
        """
        with fence.asking():
            return self._bench.con.sql(fence.query(self._bench.con, query))

    def suspect(self, rids: Iterable[int]) -> None:
        """Read the elements of these rows from the trace: ``elements`` holds them from then on."""
        con = self._bench.con
        con.register("own rids", pa.table({"rid": pa.array([int(rid) for rid in rids], pa.int64())}))
        con.execute('insert into suspects from "own rids"')
        con.unregister("own rids")
        self._bench.show_elements()


def accuse(bench: Workbench, invariant: Invariant, always: bool = False) -> tuple[int, pa.Table]:
    """Run an invariant of a user's own, and undo what it did to the tables.

    Args:
        bench: the tables.
        invariant: which.
        always: run it though there is nothing for it to look at.

    Returns:
        How many facts it looked at, and its violations, as the workbench returns those of a built-in one.

    Raises:
        CatalogueError: it failed, was refused, or what it says cannot be understood.
    """
    try:
        with fence.asking():
            examined, findings = _apart(bench, invariant, always)
            # What follows is ours: a function or table that the invariant made must not stand in for one of ours.
            return examined, _named(bench, findings, invariant.severity)
    except FenceError as error:
        beyond = "; a check reads this trace and no other file" if error.outside else ""
        raise CatalogueError(f"{invariant.origin}: {invariant.code}: {error}{beyond}") from error


def _named(bench: Workbench, findings: pa.Table, severity: str) -> pa.Table:
    bench.con.register("own findings", findings)
    lost = 'select count(*) from "own findings" where rid is null or rid not in (select rid from events)'
    try:
        if bench.number(lost):
            raise FenceError(f"{bench.number(lost)} of its rows have a rid that events does not have")
        return bench.named('"own findings"', severity)
    finally:
        bench.con.unregister("own findings")


def examined(bench: Workbench, invariant: Invariant) -> int:
    """How many facts an invariant of a user's own looks at.

    Raises:
        CatalogueError: its query is refused, or does not count.
    """
    bench.make_all()
    try:
        with fence.asking():
            return _examined(bench, invariant.examines)
    except FenceError as error:
        raise CatalogueError(f"{invariant.origin}: {invariant.code}: {error}") from error


def _apart(bench: Workbench, invariant: Invariant, always: bool) -> tuple[int, pa.Table]:
    """Facts looked at and findings, from a transaction that is rolled back."""
    bench.make_all()
    bench.con.begin()
    try:
        examined = _examined(bench, invariant.examines)
        if not (examined or always):
            return 0, _FINDINGS.empty_table()
        if invariant.check is not None:
            return examined, _from_python(bench, invariant.check)
        return examined, _from_sql(bench, invariant.sql)
    finally:
        try:
            bench.con.rollback()
        except duckdb.TransactionException as error:
            raise FenceError("it ended the transaction it runs in; a check may not commit") from error


def _examined(bench: Workbench, examines: str) -> int:
    rows = bench.con.execute(fence.query(bench.con, examines)).fetchall()
    if len(rows) != 1 or len(rows[0]) != 1 or not isinstance(rows[0][0], int | float | Decimal | None):
        raise FenceError("examines must be a query for one number")
    examined = int(rows[0][0] or 0)
    if examined < 0:
        raise FenceError(f"examines must count facts, and says {examined}")
    return examined


def _from_sql(bench: Workbench, sql: str) -> pa.Table:
    before, last = fence.script(bench.con, sql)
    for statement in before:
        fence.run(bench.con, statement)
    if before and bench.con.sql(fence.query(bench.con, "select 1 from suspects limit 1")).fetchall():
        bench.show_elements()
    fence.run(bench.con, fence.Statement("CREATE", f'create temp view "own answer" as {last}'))
    given = bench.con.view("own answer").columns
    missing = [name for name in _FINDINGS.names if name not in given]
    if missing:
        raise FenceError(f"its last statement must return {', '.join(_FINDINGS.names)}; it lacks {', '.join(missing)}")
    casts = ", ".join(
        f"cast({name} as {'bigint' if name == 'rid' else 'varchar'}) as {name}" for name in _FINDINGS.names
    )
    answer = bench.con.sql(fence.query(bench.con, f'select {casts} from "own answer"')).to_arrow_table()
    return _understood(answer.cast(_FINDINGS))


def _from_python(bench: Workbench, check: Check) -> pa.Table:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is the report's
            return _understood(pa.Table.from_pylist([_row(one) for one in check(Tables(bench))], _FINDINGS))
    except (FenceError, duckdb.Error, KeyboardInterrupt):
        raise
    except BaseException as error:  # an exit is no verdict either
        if interrupted(error):
            raise
        raise FenceError(f"it raised {type(error).__name__}: {first_line(error)}") from error


def _understood(findings: pa.Table) -> pa.Table:
    for severity in findings["severity"].unique().to_pylist():
        if severity not in (*SEVERITIES, None):
            raise FenceError(f"severity {severity!r}: expected error, warning or null")
    return findings


def _row(one: object) -> dict[str, object]:
    if not isinstance(one, Finding):
        raise TypeError(f"it gave a {type(one).__name__}, a Finding is wanted")
    said = {name: getattr(one, name) for name in _FINDINGS.names[1:]}
    return {"rid": int(one.rid)} | {name: None if value is None else str(value) for name, value in said.items()}
