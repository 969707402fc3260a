"""The fence round a trace: which SQL of a user is run at all.

DuckDB's own settings keep a query from every file but the trace. They do not keep it from writing there: a path that
may be read may be written. So a statement is run only when it is of a kind that reads, by DuckDB's own parser, and when
the plan DuckDB made for it writes nothing and calls no table function but harmless ones: ``with t as (copy ... to ...)
select ...`` is a SELECT and writes a file, and a function may run a statement of its own.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import duckdb
from duckdb import DuckDBPyConnection

from lineage.errors import UserError, first_line
from lineage.traces.interrupts import as_keyboard_interrupt, interrupted

# Set before the trace is opened, and locked after: none of them can be set once external access is off.
_SETTINGS = (
    "python_enable_replacements=false",  # a table of that name is not a variable of the caller
    "allow_persistent_secrets=false",  # those of the home folder are not looked up
    "autoinstall_known_extensions=false",
    "autoload_known_extensions=false",
)
_READS = frozenset({"SELECT"})
_MAKES = frozenset({"CREATE", "INSERT", "DELETE", "UPDATE"})
_MADE = "CREATE of a table, view or macro, INSERT, UPDATE, DELETE"
# Operators of a plan that write, and those among them that write tables, views and macros of the connection only.
_WRITER = re.compile(r"COPY|EXPORT|CREATE|INSERT|DELETE|UPDATE|MERGE|ATTACH|SECRET")
_OF_TABLES = re.compile(r"(BATCH_)?(CREATE_TABLE(_AS)?|INSERT)|CREATE_VIEW|CREATE_MACRO|DELETE(_OPERATOR)?|UPDATE")
# Table functions that are run: those that make rows, read the trace, or describe the connection. Others are refused,
# new ones of a later DuckDB too.
_HARMLESS = re.compile(
    r"range|generate_series|unnest|repeat|repeat_row|json_each|json_tree|summary|seq_scan|(python_)?arrow_scan|pandas_scan"
    r"|read_parquet|parquet_(scan|schema|metadata|file_metadata|full_metadata|kv_metadata)|read_blob|read_text"
    r"|duckdb_(columns|constraints|databases|functions|keywords|schemas|settings|tables|types|views)"
    r"|pragma_(show|table_info|version)",
    re.IGNORECASE,
)


class FenceError(UserError):
    """SQL that failed or was not run, in one line.

    Attributes:
        outside: it asked for something that is not the trace, or wanted to write.
    """

    def __init__(self, said: str, outside: bool = False) -> None:
        super().__init__(said)
        self.outside = outside


@dataclass(frozen=True)
class Statement:
    """One statement of a text, and its kind by DuckDB's parser."""

    kind: str
    sql: str


def prepare(con: DuckDBPyConnection) -> None:
    """Settings of a connection that users' SQL will run in, before its external access is taken away."""
    for setting in _SETTINGS:
        con.execute(f"set {setting}")
    # What does not fit into memory goes to a folder of our own: users' SQL may read the folder it goes to.
    con.execute("set temp_directory=?", [str(Path(tempfile.gettempdir()) / f"lineage-spill-{uuid4().hex}")])


def query(con: DuckDBPyConnection, sql: str) -> str:
    """The one query a text consists of, after a look at its plan.

    Raises:
        FenceError: it is not one query, it is not valid, or it would write.
    """
    found = _split(con, sql)
    if len(found) != 1:
        raise FenceError("expected a query" if not found else f"expected one query, found {len(found)} statements")
    _admit(con, found[0], _READS)
    return found[0].sql


def script(con: DuckDBPyConnection, sql: str) -> tuple[list[Statement], str]:
    """The statements of a text that prepare tables, not yet looked at, and the query it ends with, likewise.

    Raises:
        FenceError: it is not valid SQL, or does not end with a query.
    """
    found = _split(con, sql)
    if not found or found[-1].kind not in _READS:
        raise FenceError("its last statement must be a query")
    return found[:-1], found[-1].sql


def run(con: DuckDBPyConnection, statement: Statement) -> None:
    """Run a statement that prepares tables, after a look at its plan.

    Raises:
        FenceError: it is of another kind, or it failed.
    """
    _admit(con, statement, _READS | _MAKES, f" (beside queries: {_MADE})")
    with asking():
        con.execute(statement.sql)


@contextmanager
def asking() -> Iterator[None]:
    """DuckDB's errors as one line each.

    Raises:
        FenceError: the first line of what DuckDB said.
    """
    with as_keyboard_interrupt():
        try:
            yield
        except duckdb.Error as error:
            if interrupted(error):
                raise
            said = first_line(error)
            raise FenceError(said, isinstance(error, duckdb.PermissionException) or "been locked" in said) from error


def _split(con: DuckDBPyConnection, sql: str) -> list[Statement]:
    if any("\ud800" <= character <= "\udfff" for character in sql):
        raise FenceError("not UTF-8 text")
    with asking():
        found = [Statement(_kind(one), one.query) for one in con.extract_statements(sql)]
    if any(one.kind == "MULTI" or not one.sql.strip() for one in found):  # it makes a type before it is a query
        raise FenceError("a PIVOT must name its columns here, as in: pivot t on stage in ('rollout', 'reward')")
    return found


def _kind(statement: Any) -> str:
    """The kind of a parsed statement; Python's module does not know them all by name."""
    try:
        name = str(statement.type.name)
    except ValueError:
        return "this statement"
    return name if name.isidentifier() else "this statement"


def _admit(con: DuckDBPyConnection, statement: Statement, kinds: frozenset[str], allowed: str = "") -> None:
    if statement.kind not in kinds:
        raise FenceError(f"{statement.kind} is refused{allowed}", outside=True)
    with asking():
        plans = con.execute(f"explain (format json) {statement.sql}").fetchall()
    operators = {name for _, plan in plans for name in _operators(json.loads(plan))}
    if not operators:
        raise FenceError(f"{statement.kind} is refused: DuckDB shows no plan of it", outside=True)
    for name in sorted(operators):
        writes = _WRITER.search(name) and (statement.kind in _READS or not _OF_TABLES.fullmatch(name))
        if writes or (name in _table_functions() and not _HARMLESS.fullmatch(name)):
            raise FenceError(f"{name} is refused{allowed}", outside=True)


def _operators(plan: Any) -> Iterator[str]:
    """Names of the operators of a plan in DuckDB's JSON; that of a scan is its table function's."""
    for node in plan if isinstance(plan, list) else [plan]:
        yield from str(node.get("name", "")).upper().split()[:1]
        yield from _operators(node.get("children", []))


@cache
def _table_functions() -> frozenset[str]:
    """Names of the table functions of this DuckDB, as its plans write them."""
    with duckdb.connect() as con:
        found = con.execute(
            "select distinct upper(function_name) from duckdb_functions() where function_type = 'table'"
        )
        return frozenset(name for (name,) in found.fetchall())
