"""Which elements of a trace are kept as they are, beside the signatures: a small table for each kind of row.

A check that recomputes something needs the numbers themselves, not a signature of them. Each table here is named after
what its rows are; beside every element stand the scalars of its row named in :data:`PLACE`. What is kept of every
trajectory is kept of millions: one column more costs time and memory in every check.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# distinct texts, and of each row its place among them
Text = tuple[NDArray[np.str_], NDArray[np.int64]]
Wanted = NDArray[np.bool_]  # (rows,)

#: scalars of its row that stand beside every element
PLACE = ("step_id", "stage", "op", "entity", "field", "against", "partition", "ord")
LENGTH_TAGS = ("prompt_len", "response_len", "seq_len")
# ``score``: what a scorer of whole batches said beside the token it put it on
REWARDS = ("rm_scores", "token_level_scores", "token_level_rewards", "score")


@dataclass(frozen=True)
class Words:
    """The words of each row of a row group, ``(rows,)`` each; empty text where there is none."""

    stage: Text
    op: Text
    entity: Text
    field: Text

    def has(self, column: str, *words: str) -> Wanted:
        """Rows with one of these words in that column."""
        distinct, at = getattr(self, column)
        found: Wanted = np.array([text in words for text in distinct.tolist()], dtype=bool)[at]
        return found


@dataclass(frozen=True)
class Cells:
    """One table of elements.

    Attributes:
        columns: columns of the trace; ``i`` is the place of the element in its row, from 1, ``before`` the fingerprint
            of what comes before it in its sequence, where the row marks its borders.
        wanted: the rows whose elements are kept.
    """

    columns: tuple[str, ...]
    wanted: Callable[[Words], Wanted]


def _keys(row: Words) -> Wanted:
    whole = row.has("field", "key") & row.has("op", "produce", "pad", "reorder")
    tag = row.has("op", "tag") & ~row.has("field", *LENGTH_TAGS)
    unjudged = row.has("stage", "reward") & row.has("op", "filter")
    return row.has("entity", "trajectory") & (whole | tag | unjudged)


def _tags(row: Words) -> Wanted:
    return row.has("entity", "trajectory") & row.has("op", "tag") & row.has("field", "status")


def _groups(row: Words) -> Wanted:
    prompts = row.has("entity", "prompt") & row.has("op", "produce", "tag", "filter")
    return prompts | (row.has("entity", "metric") & row.has("field", "metrics"))


def _rewards(row: Words) -> Wanted:
    made = row.has("op", "score", "produce", "forward")
    return row.has("entity", "trajectory") & row.has("field", *REWARDS) & made


def _advantages(row: Words) -> Wanted:
    made = row.has("op", "forward") & row.has("field", "advantages", "returns")
    return row.has("entity", "trajectory") & made


def _token_sums(row: Words) -> Wanted:
    driver = row.has("op", "produce") & row.has(
        "field", "old_log_probs", "entropy", "rollout_log_probs", "ref_log_prob"
    )
    policy = row.has("op", "forward") & row.has("field", "log_probs") & row.has("stage", "update_actor")
    return row.has("entity", "trajectory") & (driver | policy)


def _dumped(row: Words) -> Wanted:
    return row.has("entity", "trajectory") & row.has("op", "produce") & row.has("field", "dump")


def _losses(row: Words) -> Wanted:
    terms = row.has("stage", "update_actor") & row.has("field", "pg_loss", "entropy_loss", "kl_loss")
    wanted = row.has("op", "forward") & (terms | row.has("field", "rollout_is_weights"))
    return row.has("entity", "trajectory") & wanted


def _dataset(row: Words) -> Wanted:
    return (
        row.has("entity", "dataset_row")
        & row.has("op", "produce")
        & row.has("field", "index", "raw_prompt", "reward_model")
    )


def _prompts(row: Words) -> Wanted:
    return row.has("entity", "prompt") & row.has("op", "consume") & row.has("field", "raw_prompt")


#: the tables, by name
CELLS: dict[str, Cells] = {
    "key_cells": Cells(
        ("i", "is_padding", "global_steps_tag", "min_global_steps", "max_global_steps", "reason", "source_index"), _keys
    ),
    "group_cells": Cells(("i", "status", "reason", "expected", "source_index", "sum", "data_source"), _groups),
    "reward_cells": Cells(("sum", "sum_in", "nnz", "last_nnz", "valid_length", "mask_sum"), _rewards),
    "advantage_cells": Cells(("sum_in", "min_in", "max_in", "mask_sum"), _advantages),
    "token_sum_cells": Cells(("sum_in", "mask_sum"), _token_sums),
    "dump_cells": Cells(("sum", "is_padding"), _dumped),
    "loss_cells": Cells(("sum_in", "min_in", "max_in", "mask_sum"), _losses),
    "pair_cells": Cells(
        ("absdiff_sum", "absdiff_max", "corr0", "corr_prev", "corr_next", "n_equal", "n_in"),
        lambda row: row.has("op", "compare"),
    ),
    "turn_cells": Cells(
        (
            "turn", "start", "before", "role", "generated", "truncated_from", "trimmed", "valid_length",
            "fingerprint",
        ),
        lambda row: row.has("entity", "turn"),
    ),
    "tag_cells": Cells(("generated", "finish_reason"), _tags),
    "request_cells": Cells(
        ("valid_length", "fingerprint", "finish_reason", "generated", "truncated_from"),
        lambda row: row.has("entity", "request"),
    ),
    "param_cells": Cells(("fingerprint", "length", "status"), lambda row: row.has("entity", "param")),
    "dataset_cells": Cells(("source_index", "fingerprint"), _dataset),
    "prompt_cells": Cells(("fingerprint",), _prompts),
}  # fmt: skip
