"""What two traces can be compared over: steps, keys and runs in common, names of what may differ."""

from __future__ import annotations

import copy

import pytest
from two_steps import PLACE

from lineage.traces import TraceError
from lineage.traces.diff import ASPECTS, UnknownAspect, aspects, compare, diff


def test_runs_without_a_key_in_common_are_said_to_be_so(trace, rows):
    """Other seeds give other uids: one line, not a million facts that are missing."""
    changed = copy.deepcopy(rows)
    for row in changed:
        if row["entity"] in ("trajectory", "prompt", "turn", "request") and row["key"]:
            row["key"] = [f"other{key}" for key in row["key"]]
    found = diff(trace(), trace("b", changed))
    assert found.disjoint
    assert not found.equal
    assert (found.counts, found.differences, found.first) == ((), (), None)


def test_keys_in_common_later_are_compared(trace, rows):
    """Two runs whose first steps share no key, and whose second do, are compared."""
    changed = copy.deepcopy(rows)
    for row in changed:
        if row["global_steps"] == 1 and row["entity"] in ("trajectory", "prompt") and row["key"]:
            row["key"] = [f"other{key}" for key in row["key"]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "SLICE_FACTS", 1)
        found = diff(trace(), trace("b", changed))
    assert not found.disjoint
    assert {one.first_step for one in found.counts} == {1}


def test_what_is_not_whole_is_not_compared(trace, rows):
    """A torn step is left out on both sides: no difference is then no proof, a difference is one."""
    torn = trace("b", [row for row in rows if row["global_steps"] < 2 or row["seq"] % 2], state={"torn": [2]})
    found = diff(trace(), torn)
    assert (found.equal, found.complete, found.unseen, found.steps) == (True, False, (2,), (0, 1))
    assert "torn" in found.b.incomplete
    changed = copy.deepcopy(rows)
    changed[0]["producer"] = "another"
    assert not diff(trace("c", changed), torn).equal


def test_settings_that_differ_are_listed(trace):
    """Configurations are not facts: they are named, and do not count."""
    a = trace("a", config={"trainer": {"seed": 1, "x": [1]}}, run={"versions": {"torch": "2.11"}})
    b = trace("b", config={"trainer": {"seed": 1, "x": [2]}}, run={"versions": {"torch": "2.12"}})
    found = diff(a, b)
    assert found.equal
    assert [(one.name, one.a, one.b) for one in found.settings] == [
        ("trainer.x", [1], [2]),
        ("versions.torch", "2.11", "2.12"),
    ]


def test_several_runs_are_refused(trace, rows):
    """Rows of two runs cannot be told apart by key: the line names them."""
    both = trace("b", [*rows, *({**row, "run_id": "second"} for row in rows)])
    with pytest.raises(TraceError, match="rows of 2 runs \\(second, synthetic\\)"):
        diff(trace(), both)


def test_steps_of_one_side_are_counted_as_steps(trace, rows):
    """A shorter run differs by its steps alone, which can be allowed; a range of steps leaves them out."""
    short = trace("b", [row for row in rows if row["global_steps"] != 2])
    found = diff(trace(), short)
    assert (found.only_a, found.only_b, found.counts, found.equal) == ((2,), (), (), False)
    assert diff(trace(), short, ignore=["steps"]).equal
    assert diff(trace(), short, steps=(0, 1)).equal
    with pytest.raises(TraceError, match="no step from 8 to 9"):
        diff(trace(), short, steps=(8, 9))


def test_names_of_aspects():
    """Names and groups, repeated or with commas; another name is one line with a suggestion."""
    assert aspects.allowed() == PLACE
    assert aspects.allowed(["layout, dtype", "copies"]) == PLACE | {"layout", "dtype", "copies"}
    assert aspects.allowed(["form"]) >= {aspect.name for aspect in ASPECTS if aspect.group == aspects.FORM}
    assert aspects.allowed(strict=True) == {"timing"}
    with pytest.raises(UnknownAspect, match="no aspect 'layuot', did you mean 'layout'; known: steps, missing, length"):
        aspects.allowed(["layuot"])
