"""Assertions on traces: what they hold to, and what they say when they fail."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import synthetic
from faults import FAULTS

import lineage
from lineage.checks import Baseline, Kind
from lineage.checks.assertions import assert_invariants, assert_violates, verdicts_on
from lineage.checks.catalogue import CatalogueError
from lineage.errors import UserError
from lineage.traces import TraceError

SAMPLES = Path(__file__).parents[2] / "traces" / "samples"
GOOD, BAD = SAMPLES / "good.parquet", SAMPLES / "bad" / "MSK002.parquet"
Write = Callable[..., Path]
Rows = list[synthetic.Row]


@pytest.fixture(scope="module")
def culprit() -> str:
    """The first trajectory at fault in BAD."""
    first = lineage.check(BAD, select=["MSK002"]).verdict("MSK002").first
    assert first is not None
    assert first.key is not None
    return first.key


def failure(trace: Any, **options: Any) -> list[str]:
    """The lines of an assertion that fails."""
    with pytest.raises(AssertionError) as caught:
        assert_invariants(trace, **options)
    return str(caught.value).splitlines()


@pytest.mark.parametrize("held", [GOOD, str(GOOD), SimpleNamespace(trace=GOOD)], ids=["path", "text", "recording"])
def test_a_trace_that_keeps_its_contracts_gives_its_report(held: Any) -> None:
    """A path, its text, or something that was recorded."""
    report = assert_invariants(held, select="MSK002")
    assert {verdict.code: verdict.kind for verdict in report.verdicts} == {"MSK002": Kind.PASS}


def test_the_report_of_a_check_is_taken_as_it_is() -> None:
    """It is not judged again, so it can be given no other options."""
    report = lineage.check(GOOD, select=["MSK002"])
    assert assert_invariants(report) is report
    with pytest.raises(UserError, match="judged already"):
        assert_invariants(report, select=["KEY001"])
    assert failure(lineage.check(BAD, select=["MSK002"]))[0].startswith("MSK002 ")


def test_an_open_trace_keeps_what_was_found_on_it() -> None:
    """Each code once, the last verdict; a trace nobody asserted on has none."""
    with lineage.open(BAD) as trace:
        assert verdicts_on(trace) == {}
        assert_invariants(trace, select=["KEY001", "MSK001"])
        failure(trace, select=["MSK001", "MSK002"])
        assert verdicts_on(trace) == {"KEY001": "pass", "MSK001": "pass", "MSK002": "fail"}


def test_the_message_is_the_headline(culprit: str) -> None:
    """First the code and where, then what the check says of it, last the trace."""
    lines = failure(BAD, select="MSK002")
    assert lines[0] == "MSK002 consumers use the rollout's mask: first broken at step 2, stage update_actor"
    assert f"  at        {culprit}" in lines
    assert lines[-1] == f"  trace     {BAD}"


def test_known_violations_are_accepted(tmp_path: Path) -> None:
    """A baseline of yesterday's violations holds today."""
    known = tmp_path / "known.json"
    Baseline.of([lineage.check(BAD, select="MSK002")]).save(known)
    report = assert_invariants(BAD, select="MSK002", baseline=known)
    assert report.verdict("MSK002").kind is Kind.FAIL


def test_a_required_code_must_have_seen_something(rows: Rows, write: Write) -> None:
    """Vacuous is not enough for it, nor fewer facts than it is to see."""
    plain = write([row for step in synthetic.steps(2, synthetic.small()) for row in step])
    chosen = {"select": ["KEY001", "PAD001"]}
    assert_invariants(plain, **chosen)
    assert failure(plain, **chosen, require="PAD001")[0].startswith("PAD001 is required")
    assert failure(GOOD, select="KEY001", require={"KEY001": 10**6})[0].startswith("KEY001 is required")


def test_an_incomplete_trace_says_what_was_not_seen(rows: Rows, write: Write) -> None:
    """The torn step, the steps judged, and what an invariant lacked for it; it can be allowed."""
    kept = [row for row in rows if row.field != "input_ids"]
    path = write(kept, state={"torn": [3], "closed": False})
    chosen = {"select": ["TOK001", "KEY001"]}
    lines = failure(path, **chosen)
    assert lines == [
        "incomplete trace: step 3 torn, the run did not close its trace",
        "  judged    the complete steps (2)",
        "  not seen  TOK001 needs field input_ids (never recorded)",
        f"  trace     {path}",
    ]
    assert_invariants(path, **chosen, allow_incomplete=True)


def test_an_assertion_that_looks_at_nothing_fails(write: Write) -> None:
    """It would hold whatever the code does; the message says what each invariant lacked."""
    path = write([row for step in synthetic.steps(2, synthetic.small()) for row in step if row.field != "metrics"])
    lines = failure(path, select=["PAD001", "PAD002"], allow_incomplete=True)
    assert lines[0] == "nothing was examined: no invariant found what it looks at"
    assert lines[1:3] == ["  PAD001    vacuous", "  PAD002    needs field metrics (never recorded)"]


@pytest.mark.parametrize(
    ("arguments", "options", "error", "says"),
    [
        (["nowhere.parquet"], {}, TraceError, "nowhere.parquet"),
        ([GOOD], {"select": "KEY999"}, CatalogueError, "KEY999"),
        ([3], {}, UserError, "3: give a path, an open trace, a recording or a report"),
    ],
    ids=["no trace", "no such code", "not a trace"],
)
def test_what_cannot_be_judged_is_no_failed_assertion(
    arguments: list[Any], options: dict[str, Any], error: type[Exception], says: str
) -> None:
    """A test that expects an AssertionError does not take a mistake for one; the traceback ends at the assertion."""
    with pytest.raises(error, match=says) as caught:
        assert_invariants(*arguments, **options)
    assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)][1:] == ["assert_invariants"]


def test_a_fault_is_caught_where_it_was_made(culprit: str) -> None:
    """By any part of its place; what is given back are the violations there."""
    (found,) = assert_violates(BAD, "msk002", stage="update_actor", field="log_probs", key=culprit, step=2)
    assert (found.global_steps, found.stage, found.field, found.key) == (2, "update_actor", "log_probs", culprit)
    every = assert_violates(BAD, "MSK002")
    assert found in every
    assert assert_violates(lineage.check(BAD, select="MSK002"), "MSK002", step=2) == every


@pytest.mark.parametrize("place", [{"stage": "rollout"}, {"field": "values"}, {"key": "u_0_0"}, {"step": 1}])
def test_a_fault_elsewhere_is_not_the_one_looked_for(place: dict[str, Any], culprit: str) -> None:
    """The message says where it is instead."""
    with pytest.raises(AssertionError) as caught:
        assert_violates(BAD, "MSK002", **place)
    ((name, value),) = place.items()
    assert str(caught.value).splitlines()[:2] == [
        f"MSK002 is not violated at {name} {value}, but elsewhere:",
        f"  step 2, stage update_actor, field log_probs, key {culprit}",
    ]


def test_no_violation_says_how_much_was_looked_at() -> None:
    """An invariant that passed, and how many facts it saw."""
    with pytest.raises(AssertionError, match=r"^KEY001 is not violated: pass, [\d,]+ examined$"):
        assert_violates(GOOD, "KEY001")


def test_of_many_violations_a_few_are_shown(rows: Rows, write: Write) -> None:
    """The rest are counted."""
    fault, _ = FAULTS["QUE003"]
    fault(rows)
    path = write(rows)
    found = assert_violates(path, "QUE003")
    assert len(found) > 5
    with pytest.raises(AssertionError) as caught:
        assert_violates(path, "QUE003", step=99)
    lines = str(caught.value).splitlines()
    assert (len(lines), lines[-1]) == (7, f"  and {len(found) - 5} more")


def test_one_code_is_looked_for() -> None:
    """A family, or a code the report did not judge, is a mistake."""
    with pytest.raises(UserError, match="MSK: name one code of those judged: MSK001, MSK002, MSK003"):
        assert_violates(BAD, "MSK")
    with pytest.raises(UserError, match="KEY001: name one code of those judged: MSK002"):
        assert_violates(lineage.check(BAD, select=["MSK002"]), "KEY001")
