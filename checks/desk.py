"""A desk: one connection at which invariants ask the tables of the workbench. Several are asked at the same time.

The tables every invariant may ask for are in the database, where each desk sees them, and are made when the first one
asks. What belongs to one question is of its desk: the tables an invariant makes for itself, ``suspects``, ``elements``
and ``violations``.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import RLock
from typing import Any, TypeVar

import pyarrow as pa
from duckdb import DuckDBPyConnection

_WORD = re.compile(r"[a-z_]+")
_NOBODY = pa.table({})
#: violations of a code that are told one by one
LISTED = 1000
# A statement is parsed once in a process: of few rows, a seventh of what it costs to ask it.
_PARSED: dict[str, Any] = {}

Task = TypeVar("Task")
Answer = TypeVar("Answer")


class Shared:
    """Tables that all desks see, each made by the first that asks for it.

    Attributes:
        judged: ids of the steps whose violations count; all when None.
    """

    def __init__(self) -> None:
        self.judged: frozenset[int] | None = None
        self._unmade: dict[str, str] = {}
        self._place: dict[str, int] = {}
        self._locks: dict[str, RLock] = {}

    def plan(self, tables: Mapping[str, str]) -> None:
        """These tables are to be made, by name; each is made of some that stand before it."""
        self._unmade = dict(tables)
        self._place = {name: place for place, name in enumerate(tables)}
        self._locks = {name: RLock() for name in tables}

    def make(self, names: Sequence[str], desk: Desk, before: int | None = None) -> None:
        """Make those of ``names`` that are tables, and what they are made of; wait for those another desk is making."""
        if not self._unmade:
            return
        for name in names:
            place = self._place.get(name)
            # A table looks at earlier ones only: so no two desks can wait for each other.
            if place is None or (before is not None and place >= before):
                continue
            with self._locks[name]:
                if name in self._unmade:
                    desk.run(self._unmade[name], place)
                    del self._unmade[name]


class Desk:
    """One connection to the tables.

    Args:
        con: its own.
        shared: what all desks see.
    """

    def __init__(self, con: DuckDBPyConnection, shared: Shared) -> None:
        self.con, self.shared = con, shared

    def furnish(self, statements: Sequence[str]) -> None:
        """Make what does not depend on the rows, ``suspect_elements`` and ``no_elements`` among it."""
        for statement in statements:
            self.con.execute(statement)
        self.show_elements(suspected=False)

    def show(self, tables: Mapping[str, pa.Table]) -> None:
        """Let these tables be asked."""
        for name, table in tables.items():
            self.con.register(name, table)

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
        judged = self.shared.judged
        own = "" if judged is None else f" where e.step_id in ({', '.join(map(str, sorted(judged)))})"
        self.con.execute(f"create or replace temp table violations as {_named(findings, severity)}{own}")
        first = f"select * from violations order by ord, key nulls last, expected, actual limit {LISTED}"
        return self.con.sql(first).to_arrow_table()

    def show_elements(self, suspected: bool = True) -> None:
        """Let ``elements`` be those of the suspects, or none."""
        # of none, the planner leaves out what hangs on them
        source = f"select * from {'suspect_elements' if suspected else 'no_elements where false'}"
        self.con.execute(f"create or replace temp view elements as {source}")

    def need(self, names: Sequence[str], before: int | None = None) -> None:
        """Make those of ``names`` that are tables: few codes need them all."""
        self.shared.make(names, self, before)

    def number(self, query: str) -> int:
        """A single number."""
        rows = self.run(query)
        return int(rows[0][0] or 0) if rows else 0

    def run(self, statement: str, before: int | None = None) -> list[tuple[Any, ...]]:
        """Rows of one statement, read to the end.

        Args:
            statement: which.
            before: of a statement that makes a shared table: its place among them.
        """
        self.need(words(statement), before)
        if statement not in _PARSED:
            (_PARSED[statement],) = self.con.extract_statements(statement)
        return list(self.con.execute(_PARSED[statement]).fetchall())


def ask_all(desks: Sequence[Desk], tasks: Sequence[Task], ask: Callable[[Desk, Task], Answer]) -> list[Answer]:
    """The answers to all tasks in their order, each asked at whichever desk is free.

    Args:
        desks: the first is asked in this thread.
        tasks: what to ask.
        ask: how.
    """
    waiting = deque(enumerate(tasks))
    answers: dict[int, Answer] = {}

    def work(desk: Desk, take: Callable[[], tuple[int, Task]]) -> None:
        while waiting:
            try:
                at, task = take()
            except IndexError:  # another desk took the last one
                return
            answers[at] = ask(desk, task)

    first, *others = desks
    with ThreadPoolExecutor(max_workers=max(1, len(others))) as pool:
        try:
            # Neighbours ask for the same tables: begun at both ends, few desks wait for each other.
            running = [pool.submit(work, desk, waiting.pop) for desk in others]
            work(first, waiting.popleft)
            for one in running:
                one.result()
        except BaseException:
            waiting.clear()
            for desk in others:
                desk.con.interrupt()
            raise
    return [answers[at] for at in range(len(tasks))]


@cache
def words(statement: str) -> tuple[str, ...]:
    """What a statement is made of, in order: names of tables among it."""
    return tuple(dict.fromkeys(_WORD.findall(statement)))


@cache
def statements(sql: str) -> tuple[str, ...]:
    """Statements of a file, without its comments; each ends with a semicolon at the end of a line, the last may not."""
    lines = [line for line in sql.splitlines() if not line.lstrip().startswith("--")]
    return tuple(part.strip() for part in "\n".join(lines).split(";\n") if part.strip().rstrip(";"))


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
