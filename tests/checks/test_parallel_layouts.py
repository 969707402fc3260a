"""Traces of layouts with several ranks a replica: what such a run says legally, and what may not pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic

from lineage.checks import Kind, check
from lineage.checks.verdict import Verdict

Rows = list[synthetic.Row]
Place = dict[str, int]
CODES = ["TOP001", "TOP002", "TOP003", "BAT001", "BAT002", "BAT003", "KEY005", "KEY006"]
DP = 2  # of the synthetic run: the batch is dealt in two
#: what the backend reports, and where its ranks are, replica by replica
LAYOUTS: dict[str, tuple[dict[str, Any], list[list[Place]]]] = {
    "ulysses": (
        {"backend": "fsdp2", "world_size": 4, "fsdp_size": 4, "sp": 2},
        [[{"dp": dp, "sp": sp} for sp in range(2)] for dp in range(DP)],
    ),
    "megatron": (
        {"backend": "megatron", "world_size": 16, "tp": 2, "pp": 2, "cp": 2, "ep": 2},
        [
            [
                {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": dp}
                for tp in range(2)
                for pp in range(2)
                for cp in range(2)
            ]
            for dp in range(DP)
        ],
    ),
}


@pytest.fixture(params=LAYOUTS)
def spread(request: pytest.FixtureRequest, rows: Rows) -> Rows:
    """The clean run as the ranks of a layout say it: each says the rows of its replica."""
    sizes, replicas = LAYOUTS[request.param]
    said: Rows = []
    for row in rows:
        if "topology" in row.scalars:
            own = sizes | {"reported_dp": DP, "rollout_tp": 2, "rollout_dp": 2}
            row.scalars["topology"] = own
        coord = row.scalars.get("coord")
        if coord is None:
            said.append(row)
            continue
        for place in replicas[coord["dp"]]:
            scalars = row.scalars | {"coord": place}
            said.append(synthetic.Row(row.stage, row.op, row.field, row.entity, scalars, dict(row.lists)))
    return said


@pytest.fixture
def judged(write: Callable[..., Path]) -> Callable[[Rows, str], Verdict]:
    """The verdict of one code."""

    def _judged(rows: Rows, code: str) -> Verdict:
        (verdict,) = check(write(rows), select=[code]).verdicts
        return verdict

    return _judged


def test_ranks_of_a_replica_repeat_its_rows(spread: Rows, write: Callable[..., Path]) -> None:
    """No code is broken, and those of the layout have looked at something."""
    verdicts = check(write(spread), select=CODES).verdicts
    assert {one.code: (one.errors, one.warnings) for one in verdicts} == dict.fromkeys(CODES, (0, 0))
    assert {one.kind for one in verdicts if one.code.startswith("TOP")} == {Kind.PASS}


def test_a_rank_with_rows_of_another_replica_is_named(spread: Rows, judged: Callable[[Rows, str], Verdict]) -> None:
    """A rank that is not the first of its replica was dealt by its number in the world."""
    deals = [row for row in spread if row.op == "dispatch" and row.scalars["global_steps"] == 2]
    mine, theirs = deals[-1], deals[0]
    assert mine.scalars["coord"]["dp"] != theirs.scalars["coord"]["dp"]
    mine.lists = dict(theirs.lists)
    verdict = judged(spread, "TOP002")
    assert {(one.global_steps, one.detail) for one in verdict.violations} == {(2, f"replica {DP - 1}")}


@pytest.mark.parametrize("dp", [1, 4, 16])
def test_another_size_than_the_layout_s_is_named(dp: int, spread: Rows, judged: Callable[[Rows, str], Verdict]) -> None:
    """Reported DP is the world over what its replicas are made of, never the world or the shards."""
    for row in spread:
        if row.stage == "init" and "topology" in row.scalars:
            row.scalars["topology"] = row.scalars["topology"] | {"reported_dp": dp}
    assert {(one.expected, one.actual) for one in judged(spread, "TOP001").violations} == {("DP 2", f"DP {dp}")}


def test_dynamic_context_parallel_hands_every_rank_the_whole_batch(
    rows: Rows, write: Callable[..., Path], judged: Callable[[Rows, str], Verdict]
) -> None:
    """Its DP is 1: the ranks are of one replica, and one that holds a part only is named."""
    said: Rows = []
    for row in rows:
        if "topology" in row.scalars:
            sizes = {"backend": "megatron", "world_size": 4, "cp": 2, "dynamic_cp": True}
            row.scalars["topology"] = sizes | {"reported_dp": 1, "rollout_tp": 1, "rollout_dp": 1}
        row.scalars.pop("map_attrs", None)
        if row.op != "dispatch":
            if "coord" not in row.scalars:
                said.append(row)
            continue
        if row.scalars["coord"]["dp"]:
            continue
        batch = [each for each in rows if each.op == "dispatch" and _step(each) == _step(row)]
        whole = {"key": np.concatenate([each.lists["key"] for each in batch])}
        for cp in range(4):
            scalars = row.scalars | {"coord": {"dp": 0, "cp": cp}}
            said.append(synthetic.Row(row.stage, row.op, row.field, row.entity, scalars, dict(whole)))
    codes = ["TOP001", "TOP002", "TOP003"]
    assert {one.code: one.kind for one in check(write(said), select=codes).verdicts} == dict.fromkeys(codes, Kind.PASS)
    last = [row for row in said if row.op == "dispatch"][-1]
    last.lists = {"key": last.lists["key"][1:]}
    assert [one.detail for one in judged(said, "TOP002").violations] == ["replica 0"]


def _step(row: synthetic.Row) -> int:
    return int(row.scalars["global_steps"])
