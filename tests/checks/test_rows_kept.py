"""Rows that are kept, doubled, dealt and drawn: the legal ways that must stay silent beside those that may not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import synthetic

from lineage.checks import check
from lineage.checks.verdict import Verdict

Rows = list[synthetic.Row]


def judged(path: Path, code: str) -> Verdict:
    """The verdict of one code."""
    (verdict,) = check(path, select=[code]).verdicts
    return verdict


def said(verdict: Verdict) -> list[tuple[str, str]]:
    """Severity and key of each violation."""
    return [(one.severity, str(one.key)) for one in verdict.violations]


def row_of(rows: Rows, stage: str, op: str, field: str, step: int = 2) -> synthetic.Row:
    """The first such row of a step."""
    wanted = (stage, op, field, step)
    return next(row for row in rows if (row.stage, row.op, row.field, row.scalars["global_steps"]) == wanted)


def copy_answer(rows: Rows, source: int, target: int, log_prob: float) -> str:
    """Give one trajectory of step 2 another's response and log-probs; returns its key."""
    for field in ("responses", "rollout_log_probs"):
        row = row_of(rows, "rollout", "produce", field)
        for name in row.lists.keys() - {"key", "slot"}:
            row.lists[name] = row.lists[name].copy()
            row.lists[name][target] = row.lists[name][source]
        if field == "rollout_log_probs":
            row.lists["sum_in"][[source, target]] = log_prob
    return str(row.lists["key"][target])


def two_of(rows: Rows, same_group: bool) -> tuple[int, int]:
    """Places of two trajectories of step 2, of one group or of two."""
    uids = [key.split("_")[0] for key in row_of(rows, "rollout", "produce", "responses").lists["key"]]
    return next((0, at) for at in range(1, len(uids)) if (uids[at] == uids[0]) is same_group)


def write_with(path: Path, rows: Rows, config: dict[str, object]) -> Path:
    """Write rows as a trace of a run with this configuration."""
    table = synthetic.to_table(rows).replace_schema_metadata(synthetic.metadata(config))
    pq.write_table(table, path)
    return path


@pytest.mark.parametrize(("log_prob", "severity"), [(-60.0, ["error"]), (-9.0, ["warning"]), (-0.5, [])])
def test_a_copy_is_as_grave_as_it_is_unlikely(rows: Rows, write: Callable[..., Path], log_prob, severity):
    """Two prompts may have one short certain answer; a long one is a copy."""
    first, other = two_of(rows, same_group=False)
    copy_answer(rows, first, other, log_prob)
    assert [one for one, _ in said(judged(write(rows), "KEY004"))] == severity


@pytest.mark.parametrize(("log_prob", "warned"), [(-40.0, 1), (-0.3, 0)])
def test_a_policy_that_is_sure_may_repeat_itself(rows: Rows, tmp_path: Path, log_prob, warned):
    """Sessions of one group answer alike where their log-probs let expect it."""
    copy_answer(rows, *two_of(rows, same_group=True), log_prob)
    sampled = {"actor_rollout_ref": {"rollout": {"temperature": 1.0}}}
    assert judged(write_with(tmp_path / "trace.parquet", rows, sampled), "KEY009").warnings == warned


def test_greedy_sessions_are_no_copies(rows: Rows, tmp_path: Path):
    """At temperature 0 all sessions of a group answer alike, and nothing is examined."""
    copy_answer(rows, *two_of(rows, same_group=True), -40.0)
    greedy = {"actor_rollout_ref": {"rollout": {"temperature": 0.0}}}
    verdict = judged(write_with(tmp_path / "trace.parquet", rows, greedy), "KEY009")
    assert (str(verdict.kind), verdict.warnings) == ("vacuous", 0)


def take(row: synthetic.Row, places: np.ndarray) -> None:
    """Leave only these elements in a row."""
    row.lists = {name: values[places] for name, values in row.lists.items()}
    row.scalars["asked_n"] = len(places)


def test_a_stage_may_take_its_batch_twice_or_without_padding_but_not_in_part(rows: Rows, write: Callable[..., Path]):
    """A stage that reads a part of the batch is reported with the rows it left."""
    row = row_of(rows, "advantage", "consume", "rm_scores")
    whole = np.arange(len(row))
    padded = np.array([str(key).startswith("pad") for key in row.lists["key"]])
    take(row, whole[~padded])
    twice = row_of(rows, "advantage", "consume", "old_log_probs")
    take(twice, np.concatenate([whole, whole]))
    assert str(judged(write(rows), "KEY005").kind) == "pass"
    part = row_of(rows, "advantage", "consume", "response_mask", step=3)
    lost = part.lists["key"][-2:]
    take(part, whole[:-2])
    assert sorted(key for _, key in said(judged(write(rows), "KEY005"))) == sorted(lost)


def test_ranks_of_one_replica_are_counted_once_and_must_agree(rows: Rows, write: Callable[..., Path]):
    """Sequence-parallel ranks say the rows of their replica again; one that says others is reported."""
    deals = [row for row in rows if row.op == "dispatch"]
    for row in deals:
        dp = row.scalars["coord"]["dp"]
        row.scalars["coord"] = {"dp": dp, "sp": 0}
        again = synthetic.Row(row.stage, row.op, row.field, row.entity, dict(row.scalars), dict(row.lists))
        again.scalars["coord"] = {"dp": dp, "sp": 1}
        rows.insert(rows.index(row) + 1, again)
    report = check(write(rows), select=["TOP002", "KEY005", "KEY006", "BAT002"])
    assert {str(verdict.kind) for verdict in report.verdicts} == {"pass"}
    again.lists["key"] = np.roll(deals[0].lists["key"], 1)
    assert [one.detail for one in judged(write(rows), "TOP002").violations] == [f"replica {dp}"]


def draw(rows: Rows, places: dict[int, tuple[int, int]]) -> None:
    """Say the epoch and the place in it of each step's draw, in a run over 12 rows in batches of 4."""
    for row in rows:
        if row.stage == "dataset" and row.field == "index":
            epoch, drawn = places[row.scalars["global_steps"]]
            row.scalars["map_attrs"] = [("epoch", str(epoch)), ("drawn", str(drawn))]
    loader = [("train_rows", "13"), ("gen_batch_size", "4")]
    start = {"global_steps": 0}
    rows.insert(0, synthetic.Row("init", "produce", "_init_dataloader", "metric", start | {"map_attrs": loader}))


@pytest.mark.parametrize(
    ("places", "warned"),
    [
        ({1: (0, 0), 2: (0, 4), 3: (0, 8)}, 0),
        ({1: (0, 4), 2: (0, 8), 3: (1, 0)}, 0),  # the thirteenth row is left out with the rest of its batch
        ({1: (0, 0), 2: (0, 4), 3: (1, 0)}, 1),
        ({1: (0, 0), 2: (0, 8), 3: (1, 0)}, 1),
    ],
)
def test_a_draw_goes_on_where_the_last_one_ended(rows: Rows, write: Callable[..., Path], places, warned):
    """Over the end of an epoch too, where the rows that fill no batch are left."""
    draw(rows, places)
    assert judged(write(rows), "KEY007").warnings == warned


def test_steps_that_were_not_traced_are_no_hole(rows: Rows, write: Callable[..., Path]):
    """One step in two is traced: what the other drew is not known."""
    draw(rows, {1: (0, 0), 2: (0, 8), 3: (0, 4)})
    rows = [row for row in rows if row.scalars["global_steps"] != 2]
    draw(rows, {1: (0, 0), 3: (0, 8)})
    assert judged(write(rows), "KEY007").warnings == 0


@pytest.mark.parametrize(("drawn", "warned"), [(8, 0), (12, 1)])
def test_a_restored_place_is_that_of_what_was_trained(rows: Rows, tmp_path: Path, drawn, warned):
    """A run that goes on after two steps of four prompts has drawn eight, not what a loader had fetched ahead."""
    draw(rows, {1: (0, 0), 2: (0, 4), 3: (0, drawn)})
    place = [("global_steps", "2"), ("epoch", "0"), ("drawn", str(drawn))]
    rows = [row for row in rows if row.scalars["global_steps"] in (0, 3)]
    rows.insert(
        1, synthetic.Row("init", "produce", "_load_checkpoint", "metric", {"global_steps": 0, "map_attrs": place})
    )
    config = {"data": {"train_batch_size": 4}}
    assert judged(write_with(tmp_path / "trace.parquet", rows, config), "KEY007").warnings == warned


def test_a_loop_of_the_users_own_may_change_prompts(rows: Rows, tmp_path: Path):
    """What is an error of the built-in loops is a warning where a custom one may have meant it."""
    row = row_of(rows, "rollout", "produce", "prompts")
    row.lists["fingerprint"] = row.lists["fingerprint"].copy()
    row.lists["fingerprint"][0] += np.uint64(1)
    for name, severity in (("single_turn_agent", "error"), ("my_agent", "warning")):
        config = {"actor_rollout_ref": {"rollout": {"agent": {"default_agent_loop": name}}}}
        found = said(judged(write_with(tmp_path / f"{name}.parquet", rows, config), "KEY008"))
        assert {one for one, _ in found} == {severity}
