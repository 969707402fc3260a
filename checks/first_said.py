"""Which rows of a trace say a trajectory's content first: all later ones are held against those."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

# Fields and tags whose content per trajectory the others are held against, and what of it; ``v c m`` are an element's
# own share of its row's signatures.
CONTENT: dict[str, tuple[str, ...]] = {
    "prompts": ("valid_length", "fingerprint", "c"),
    "responses": ("valid_length", "fingerprint", "v", "c"),
    "response_mask": ("valid_length", "fingerprint", "mask_sum", "mask_fingerprint", "sum", "last_nnz", "c", "m"),
    "loss_mask": ("valid_length", "fingerprint", "mask_sum", "mask_fingerprint", "c"),
    "input_ids": ("valid_length", "fingerprint", "v", "c"),
    "attention_mask": ("valid_length", "fingerprint", "c"),
    "position_ids": ("valid_length", "fingerprint", "c"),
    "uid": ("fingerprint", "c"),
    "raw_prompt": ("fingerprint", "c"),
    "rm_scores": ("sum", "fingerprint", "c"),
    "num_turns": ("sum", "c"),
    **dict.fromkeys(("rollout_log_probs", "extra_fields", "multi_modal_inputs", "data_source"), ("c",)),
    "reward_model": ("fingerprint", "c"),
}
# Carried beside the content, and read back by whoever takes some rows of a batch; alone they make no trajectory.
CARRIED = frozenset(name for name, kept in CONTENT.items() if kept == ("c",)) | {"reward_model"}
# Stages that say a trajectory's content first: the rollout, the reward after it, padding rows.
EARLY = ("rollout", "reward", "balance")

Place = tuple[str | None, int | None, str | None]


@dataclass(frozen=True)
class First:
    """Which rows say content first: those of the early stages; what none of them wrote is taken where it was produced.

    Attributes:
        early: run, step and field of what the early stages wrote.
        unseen: run and step of what is not judged.
    """

    early: frozenset[Place]
    unseen: frozenset[tuple[str, int]]

    def among(self, table: pa.Table, rows: NDArray[Any]) -> list[int]:
        """Those of ``rows``, which hold content or length tags, that say it first."""
        places, stages, ops = _places(table, rows), *(_python(table, name, rows) for name in ("stage", "op"))
        return [
            row
            for row, place, stage, op in zip(rows.tolist(), places, stages, ops, strict=True)
            if (place[0] or "", place[1]) not in self.unseen
            and (op == "tag" or stage in EARLY or place not in self.early)
        ]


def early(table: pa.Table) -> set[Place]:
    """Run, step and field of what the early stages wrote in these rows."""
    entity, op, name = (texts(table, column) for column in ("entity", "op", "field"))
    written = (entity == "trajectory") & (op == "produce") & np.isin(name, tuple(CONTENT))
    return set(_places(table, np.flatnonzero(written & np.isin(texts(table, "stage"), EARLY))))


def _places(table: pa.Table, rows: NDArray[Any]) -> list[Place]:
    columns = (_python(table, name, rows) for name in ("run_id", "global_steps", "field"))
    return list(zip(*columns, strict=True))


def _python(table: pa.Table, name: str, rows: NDArray[Any]) -> list[Any]:
    return table[name].take(pa.array(rows)).to_pylist() if name in table.column_names else [None] * len(rows)


def texts(table: pa.Table, name: str) -> NDArray[Any]:
    """A text column as ``(rows,)`` of text; empty where there is none."""
    distinct, at = coded(table, name)
    found: NDArray[Any] = distinct[at]
    return found


def coded(table: pa.Table, name: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """A text column as its distinct texts, and ``(rows,)`` of each row's place among them."""
    if name not in table.column_names:
        return np.array([""]), np.zeros(table.num_rows, dtype=np.int64)
    whole = table[name].combine_chunks()
    named = whole if pa.types.is_dictionary(whole.type) else whole.dictionary_encode()
    at = pc.fill_null(named.indices, len(named.dictionary)).to_numpy(zero_copy_only=False)
    return np.array([*map(str, named.dictionary.to_pylist()), str(None)]), at
