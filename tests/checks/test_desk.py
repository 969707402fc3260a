"""Several desks that ask the tables at the same time."""

from __future__ import annotations

import re
from collections.abc import Iterator

import duckdb
import pytest
from duckdb import DuckDBPyConnection

from lineage.checks.desk import Desk, Shared, ask_all
from lineage.checks.workbench import _named_tables, _statements


@pytest.fixture
def con() -> Iterator[DuckDBPyConnection]:
    with duckdb.connect() as made:
        yield made


def desks(con: DuckDBPyConnection, count: int) -> list[Desk]:
    return [Desk(con.cursor(), Shared()) for _ in range(count)]


def test_a_shared_table_is_made_of_earlier_ones_only() -> None:
    """Two desks that each wait for a table the other one is making would wait for ever."""
    names = _named_tables()
    for place, (name, statement) in enumerate(zip(names, _statements()[4:], strict=True)):
        used = set(re.findall(r"\b(?:from|join)\s+(\w+)", statement))
        assert not used.intersection(names[place:]), name


@pytest.mark.parametrize("count", [1, 2, 3])
def test_answers_come_in_the_order_of_the_questions(con: DuckDBPyConnection, count: int) -> None:
    """Whichever desk gives them."""
    assert ask_all(desks(con, count), range(20), lambda desk, one: desk.number(f"select {one}")) == list(range(20))


def test_a_question_that_fails_ends_the_asking(con: DuckDBPyConnection) -> None:
    """Its error is raised, at the first desk and at another, and what still waits is not asked."""
    asked: list[int] = []

    def ask(desk: Desk, one: int) -> int:
        asked.append(one)
        raise ValueError(one)

    with pytest.raises(ValueError, match=r"^(0|99)$"):
        ask_all(desks(con, 2), range(100), ask)
    assert len(asked) <= 2


def test_a_shared_table_is_made_once(con: DuckDBPyConnection) -> None:
    """By the first desk that asks; the others wait for it and see it."""
    shared = Shared()
    shared.plan({"made": "create table made as select 7 as x"})  # a second time would fail
    several = [Desk(con.cursor(), shared) for _ in range(3)]
    assert ask_all(several, range(9), lambda desk, _: desk.number("select x from made")) == [7] * 9
