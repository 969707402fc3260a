"""One small fault per invariant: each takes the rows of a clean trace and breaks exactly one contract.

``FAULTS`` maps a code to its mutation and to the stage the report must blame; ``MERGED_FAULTS`` are KEY003's
in a step of several batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import synthetic

Rows = list[synthetic.Row]


def pick(rows: Rows, stage: str, op: str, field: str, step: int = 2) -> synthetic.Row:
    """The first row of this stage, op and field in a step."""
    return next(
        row for row in rows if (row.stage, row.op, row.field, row.scalars["global_steps"]) == (stage, op, field, step)
    )


def change(row: synthetic.Row, column: str, at: int, value: Any) -> None:
    """Put another value at one element of one list column, in this row only."""
    values = np.array(row.lists[column], copy=True)
    values[at] = value
    row.lists[column] = values


def everywhere(rows: Rows, field: str, key: str, step: int = 2, **values: Any) -> None:
    """Change the content of one field of one key in all rows of a step, as a fault at the producer does."""
    for row in rows:
        if row.field == field and row.scalars["global_steps"] == step and row.op != "compare" and "key" in row.lists:
            for at in np.flatnonzero(np.asarray(row.lists["key"], dtype=object) == key):
                for column, value in values.items():
                    if column in row.lists:
                        change(row, column, int(at), value)


def _rekey(rows: Rows, old: str, new: str) -> None:
    for row in rows:
        if "key" in row.lists:
            keys = np.array(row.lists["key"], dtype=object)
            keys[keys == old] = new
            row.lists["key"] = keys


def _first_key(rows: Rows, at: int = 0) -> str:
    return str(pick(rows, "rollout", "produce", "responses").lists["key"][at])


def _padding_key(rows: Rows) -> str:
    return str(pick(rows, "balance", "pad", "key").lists["key"][0])


def bad_key(rows: Rows) -> None:
    old = _first_key(rows)
    _rekey(rows, old, old.replace("_", ":"))


def lost_session(rows: Rows) -> None:
    row = pick(rows, "sample", "produce", "key")
    row.lists = {name: values[:-1] for name, values in row.lists.items()}
    for later in rows[rows.index(row) + 1 :]:
        if later.scalars["global_steps"] == 2 and later.op == "reorder":
            keep = np.isin(np.asarray(later.lists["source_index"]), [7], invert=True)
            later.lists = {name: np.asarray(values)[keep] for name, values in later.lists.items()}


def tags_left_behind(rows: Rows) -> None:
    row = pick(rows, "balance", "reorder", "key")
    change(row, "min_global_steps", 0, 7)


def short_log_probs(rows: Rows) -> None:
    key = _first_key(rows)
    everywhere(rows, "rollout_log_probs", key, valid_length=3, length=3)


def short_input_ids(rows: Rows) -> None:
    key = _first_key(rows)
    everywhere(rows, "input_ids", key, valid_length=5, length=5)


def lossy_padding(rows: Rows) -> None:
    row = pick(rows, "advantage", "pad", "old_log_probs")
    change(row, "fingerprint", 0, 12345)


def other_loss_mask(rows: Rows) -> None:
    key = _first_key(rows)
    everywhere(rows, "loss_mask", key, fingerprint=99, mask_fingerprint=99)


def rebuilt_mask(rows: Rows) -> None:
    row = pick(rows, "advantage", "pad", "rm_scores")
    at = int(np.argmax(row.lists["mask_sum"]))  # no padding row
    change(row, "mask_sum", at, int(row.lists["mask_sum"][at]) - 1)
    change(row, "mask_fingerprint", at, 4242)


def retokenised(rows: Rows) -> None:
    everywhere(rows, "input_ids", _first_key(rows), fingerprint=31337)


def unmasked_advantage(rows: Rows) -> None:
    row = pick(rows, "advantage", "forward", "advantages")
    change(row, "nnz_out", 0, 3)


def odd_mini_batch(rows: Rows) -> None:
    row = pick(rows, "update_actor", "split", "key")
    row.scalars["map_attrs"] = [("global_batch_size", "5"), ("dp_size", "2")]


def swapped_places(rows: Rows) -> None:
    """Two rows of the last reorder say of each other where they were."""
    row = reorders(rows)[-1]
    places = np.array(row.lists["source_index"], copy=True)
    places[:2] = places[1::-1]
    row.lists["source_index"] = places


def exchanged_keys(rows: Rows) -> None:
    """A real key of one batch stands in the next: the step as a whole still has every key once, and its tags."""
    one, other = reorders(rows)[-2:]
    here, there = (int(np.argmin(row.lists["is_padding"])) for row in (one, other))
    mine, theirs = one.lists["key"][here], other.lists["key"][there]
    change(one, "key", here, theirs)
    change(other, "key", there, mine)


def batch_never_reordered(rows: Rows) -> None:
    _remove(rows, reorders(rows)[-1])


def lost_rank(rows: Rows) -> None:
    _remove(rows, [row for row in rows if row.op == "dispatch"][-1])


def _remove(rows: Rows, gone: synthetic.Row) -> None:
    rows[:] = [row for row in rows if row is not gone]


def reorders(rows: Rows) -> Rows:
    """The reorder rows of the trace."""
    return [row for row in rows if row.op == "reorder"]


def scored_padding(rows: Rows) -> None:
    everywhere(rows, "rm_scores", _padding_key(rows), sum=1.0)


def diluted_metric(rows: Rows) -> None:
    row = pick(rows, "metrics", "produce", "metrics")
    at = list(row.lists["key"]).index("critic/score/mean")
    padding = pick(rows, "balance", "reorder", "key").lists["is_padding"]
    change(row, "sum", at, float(row.lists["sum"][at]) * (1 - padding.mean()))  # a padding row has score 0


def dp_of_rollout(rows: Rows) -> None:
    for row in rows:
        if "topology" in row.scalars:
            row.scalars["topology"] = row.scalars["topology"] | {"world_size": 4, "rollout_tp": 2, "rollout_dp": 2}


def one_topology(rows: Rows) -> None:
    for row in rows:
        if "topology" in row.scalars:
            row.scalars["topology"] = row.scalars["topology"] | {"tp": 2, "rollout_tp": 2}


def ghost_write(rows: Rows) -> None:
    late = pick(rows, "rollout", "produce", "rm_scores")
    at = max(i for i, row in enumerate(rows) if row.scalars["global_steps"] == 2)
    ghost = synthetic.Row(late.stage, late.op, late.field, late.entity, dict(late.scalars), dict(late.lists))
    rows.insert(at + 1, ghost)


def kept_key(rows: Rows) -> None:
    row = pick(rows, "clear", "clear", "status")
    row.lists = {name: values[:-1] for name, values in row.lists.items()}


def swapped_rows(rows: Rows) -> None:
    row = pick(rows, "update_actor", "consume", "rm_scores")
    row.lists["fingerprint"] = np.roll(row.lists["fingerprint"], 1)


FAULTS: dict[str, tuple[Callable[[Rows], None], str]] = {
    "KEY001": (bad_key, "rollout"),
    "KEY002": (lost_session, "sample"),
    "KEY003": (tags_left_behind, "balance"),
    "LEN001": (short_log_probs, "rollout"),
    "LEN002": (short_input_ids, "rollout"),
    "LEN003": (lossy_padding, "advantage"),
    "MSK001": (other_loss_mask, "rollout"),
    "MSK002": (rebuilt_mask, "advantage"),
    "TOK001": (retokenised, "rollout"),
    "ADV001": (unmasked_advantage, "advantage"),
    "BAT001": (odd_mini_batch, "update_actor"),
    "PAD001": (scored_padding, "balance"),
    "PAD002": (diluted_metric, "metrics"),
    "TOP001": (dp_of_rollout, "init"),
    "TOP003": (one_topology, "init"),
    "QUE001": (ghost_write, "rollout"),
    "QUE002": (kept_key, "clear"),
    "QUE003": (swapped_rows, "update_actor"),
}

# Faults of a step that trains on several batches, which leave its keys as a whole as they were; the stage to blame.
MERGED_FAULTS: dict[str, tuple[Callable[[Rows], None], str]] = {
    "swapped places": (swapped_places, "balance"),
    "exchanged keys": (exchanged_keys, "balance"),
    "a batch never reordered": (batch_never_reordered, "sample"),
}
