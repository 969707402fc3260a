"""The tables the invariants are written over, made once per trace.

``events``: one row per trace row of a complete step, in order (``ord``), with the digest's signatures.
``key_cells`` and the others of ``cells.py``: elements of the rows that need no suspicion, with their row's scalars.
``keys``: every key once, as ``id``, parsed from the right into ``uid``, ``session_id``, ``index``.
``keyed``: the distinct key lists, as ``k`` and ``id``.
``base``: one row per trajectory: its content as the rollout wrote it, against which later rows are held.
``expected``: the signatures a row with key list ``k`` has when it agrees with ``base``.
``suspects`` and ``elements``: an invariant names rows by ``rid`` in the first and reads their elements in the second.
``config`` and ``profile``: what the run and its profile declare, by name (see ``declared.py``).
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import pyarrow as pa

from lineage.checks.cells import CELLS, PLACE
from lineage.checks.declared import config_table, macros
from lineage.checks.digest import SCALARS, Chosen, Digest, digest, opened
from lineage.checks.profiles import Profile
from lineage.checks.slices import Index, index, light
from lineage.checks.slices import facts_of as facts_of_groups
from lineage.traces.trace import Trace, facts_of

_TABLES = Path(__file__).parent / "tables.sql"
_TABLE = "create or replace temp table"
_WORD = re.compile(r"[a-z_]+")
_NOBODY = pa.table({})
_FEW_FACTS = 300_000
#: violations of a code that are told one by one
LISTED = 1000
_UNSEEN = pa.schema([("run_id", pa.string()), ("step", pa.int64())])
# Traces whose connection has what does not depend on their rows, and statements parsed on it: it may be asked again.
_FURNISHED: WeakSet[Trace] = WeakSet()
_VIEWED: WeakSet[Trace] = WeakSet()
_PARSED: WeakKeyDictionary[Trace, dict[str, Any]] = WeakKeyDictionary()


class Workbench:
    """The tables of one trace, or of a slice of it, in its own fenced connection.

    Args:
        trace: whose.
        profile: whose conventions it follows.
        threads: to read with.
        whole: read all of it now; else :meth:`lay` says what.

    Attributes:
        sources: its row groups.
        fields: fields with at least one row in a step that is laid out.
    """

    def __init__(self, trace: Trace, profile: Profile, threads: int = 2, whole: bool = True) -> None:
        self.trace, self.profile, self.threads = trace, profile, threads
        self.con = trace.connection
        self.sources = opened(trace.batches or trace.source.files)
        self.fields: frozenset[str] = frozenset()
        self._judged: frozenset[int] | None = None
        # Of few elements a table is planned faster; of many it costs more memory than it saves time.
        small = bool(trace.batches) or facts_of_groups(self.sources) <= _FEW_FACTS
        self._kept = "table" if small else "view"
        self._placed = False
        self._unmade: dict[str, str] = {}  # tables nobody has asked for yet
        unseen = [{"run_id": run_id, "step": step} for run_id, step in trace.source.unseen]
        self.con.register("unseen", pa.Table.from_pylist(unseen, _UNSEEN))
        if whole:
            self.lay(self.read())

    def read(self, chosen: Chosen | None = None) -> Digest:
        """Digest these rows of the trace; all when None."""
        return digest(self.sources, self.threads, self.trace.source.unseen, chosen)

    def index(self) -> Index:
        """Place every row in the whole trace: what is laid out from now on are slices of it."""
        found = light(self.sources, self.threads)
        self.con.register("digest_events", pa.concat_tables([one.rows for one in found], promote_options="permissive"))
        self.run(_statements()[0])
        self._placed = True
        self._furnish()
        return index(self.con, found)

    def lay(self, found: Digest, judged: frozenset[int] | None = None) -> None:
        """Make the tables of these rows.

        Args:
            found: what was read.
            judged: ids of the steps whose violations count; all when None.
        """
        self.digest, self._judged = found, judged
        self.con.register("digest_events", found.events)
        self._furnish()  # before the tables: some of them follow what the run declares
        self._fill()
        self.fields = frozenset(self._judged_fields())

    def _fill(self) -> None:
        """Lay the rows out; a trace whose rows are replaced gets other ones."""
        con, found = self.con, self.digest
        con.register("digest_content", found.content)
        con.register("digest_first", found.first())
        for name, cells in found.cells.items():
            con.register(f"digest_{name}", cells)
        con.register("digest_names", found.names)
        con.register("keyed", found.keyed)
        places, events, *rest = _statements()
        if self.trace in _VIEWED:
            for name in (*(CELLS if self._kept == "table" else ()), *_named_tables()):
                con.execute(f"drop table if exists {name}")
        for statement in (*(() if self._placed else (places,)), events):
            self.run(statement)
        _VIEWED.add(self.trace)
        placed = {cells: f"create or replace temp {self._kept} {cells} as {_placed(cells)}" for cells in CELLS}
        self._unmade = placed | dict(zip(_named_tables(), rest, strict=True))

    def make_all(self) -> None:
        """Make every table now: for who asks the connection itself."""
        for statement in list(self._unmade.values()):
            self.run(statement)

    def _make(self, statement: str) -> None:
        """The tables a statement names, and those they are made of: few codes need them all."""
        for name in _words(statement) if self._unmade else ():
            if name in self._unmade:
                self.run(self._unmade.pop(name))

    def _furnish(self) -> None:
        """What does not depend on the rows."""
        if self.trace in _FURNISHED:
            return
        runs = [name for (name,) in self.run("select distinct coalesce(run_id, '') from digest_events")]
        # tables of DuckDB's own: every setting asked for would scan an Arrow table anew
        declared = {"config": config_table(self.trace.source, runs), "profile": self.profile.table()}
        for name, table in declared.items():
            self.con.register(f"declared_{name}", table)
            self.con.execute(f"create or replace temp table {name} as select * from declared_{name}")
            self.con.unregister(f"declared_{name}")
        for macro in macros(runs):
            self.con.execute(macro)
        self.con.execute("create or replace temp table suspects (rid bigint)")
        chosen = facts_of("(select * from stored where rid in (select rid from suspects))", "rid, ")
        self.con.execute(f"create or replace temp view suspect_elements as {chosen}")
        self.con.execute("create or replace temp table no_elements as select * from suspect_elements limit 0")
        self.show_elements(suspected=False)
        _FURNISHED.add(self.trace)

    def _judged_fields(self) -> list[str]:
        return [name for (name,) in self.run("select distinct field from events")]

    def recorded(self, column: str) -> bool:
        """True when some row of the trace says something in this column."""
        if column in SCALARS:
            values = self.digest.events[column]
            return bool(values.null_count < len(values))
        return column in self.digest.seen

    def accuse(self, sql: str, severity: str = "error") -> pa.Table:
        """Run an invariant: its last statement names violations, those before it may fill ``suspects``.

        The rows of suspects are read from the file only when there are any, and violations are described only when
        there are any: a clean trace costs neither.

        Returns:
            The first thousand, each with its event; all of them are then in the table ``violations``.
        """
        *before, last = statements(sql)
        for statement in before:
            self.run(statement)
        suspected = any("suspects" in one for one in before) and self.number("select count(*) from suspects") > 0
        if suspected:
            self.show_elements()
        try:
            if not self.run(f"select 1 from ({last.rstrip(';')}) limit 1"):
                return _NOBODY
            return self.named(f"({last.rstrip(';')})", severity)
        finally:
            if suspected:
                self.con.execute("delete from suspects")
                self.show_elements(suspected=False)

    def named(self, findings: str, severity: str) -> pa.Table:
        """Fill ``violations`` from a relation of findings; return the first thousand in order."""
        own = "" if self._judged is None else f" where e.step_id in ({', '.join(map(str, sorted(self._judged)))})"
        self.con.execute(f"create or replace temp table violations as {_named(findings, severity)}{own}")
        first = f"select * from violations order by ord, key nulls last, expected, actual limit {LISTED}"
        return self.con.sql(first).to_arrow_table()

    def show_elements(self, suspected: bool = True) -> None:
        """Let ``elements`` be those of the suspects, or none."""
        # of none, the planner leaves out what hangs on them
        source = f"select * from {'suspect_elements' if suspected else 'no_elements where false'}"
        self.con.execute(f"create or replace temp view elements as {source}")

    def number(self, query: str) -> int:
        """A single number."""
        rows = self.run(query)
        return int(rows[0][0] or 0) if rows else 0

    def run(self, statement: str) -> list[tuple[Any, ...]]:
        """Rows of one statement, read to the end; parsed once however often it is run on this connection."""
        self._make(statement)
        parsed = _PARSED.setdefault(self.trace, {})
        if statement not in parsed:
            (parsed[statement],) = self.con.extract_statements(statement)
        return list(self.con.execute(parsed[statement]).fetchall())


@cache
def _statements() -> tuple[str, ...]:
    return tuple(statements(_TABLES.read_text("utf-8")))


@cache
def _words(statement: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_WORD.findall(statement)))


@cache
def _named_tables() -> tuple[str, ...]:
    """Names of the tables that are made when they are first asked for, in their order in the file."""
    return tuple(_WORD.findall(statement.removeprefix(_TABLE))[0] for statement in _statements()[2:])


def _placed(cells: str) -> str:
    """A query for elements, each with the scalars of its row."""
    place = ", ".join(f"e.{name}" for name in PLACE)
    return f"select c.*, {place} from digest_{cells} as c join events as e using (rid)"


def statements(sql: str) -> list[str]:
    """Statements of a file, without its comments; each ends with a semicolon at the end of a line, the last may not."""
    lines = [line for line in sql.splitlines() if not line.lstrip().startswith("--")]
    return [part.strip() for part in "\n".join(lines).split(";\n") if part.strip().rstrip(";")]


def _named(findings: str, severity: str) -> str:
    """Complete each violation with the event it happened in."""
    return f"""
        select e.run_id, e.global_steps, e.seq, e.process, e.stage, e.op, e.field, v.key, v.expected, v.actual,
            v.detail, coalesce(v.severity, '{severity}') as severity, e.ord
        from (
            select rid, cast(key as varchar) as key, cast(expected as varchar) as expected,
                cast(actual as varchar) as actual, cast(detail as varchar) as detail,
                cast(severity as varchar) as severity
            from {findings}
        ) as v join events as e using (rid)
    """
