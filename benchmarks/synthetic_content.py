"""The trajectories of one synthetic step: drawn at random, lawful, with the statistics of every field."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from lineage.fingerprint import fingerprint_strings
from lineage.traces.functions import counting, repeated

R = 0x9E3779B97F4A7C15
MODULUS = 2**64


@dataclass(frozen=True)
class Size:
    """Shape of one step: ``prompts * sessions`` real trajectories and ``padding`` rows beside them."""

    prompts: int = 128
    sessions: int = 8
    mini_batches: int = 4
    micro_batches: int = 4
    dp: int = 2
    padding: int = 0

    def topology(self) -> dict[str, Any]:
        """What the actor's backend reports of this layout."""
        return {
            "backend": "fsdp",
            "world_size": self.dp,
            "reported_dp": self.dp,
            "fsdp_size": -1,
            "sp": 1,
            "rollout_tp": 1,
            "rollout_dp": self.dp,
        }


@dataclass
class Row:
    """One row of the trace before it is a row: scalar columns, and list columns of one length ``n``."""

    stage: str
    op: str
    field: str
    entity: str = "trajectory"
    scalars: dict[str, Any] = field(default_factory=dict)
    lists: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.lists.values()))) if self.lists else 0


@dataclass(frozen=True)
class Content:
    """A field's statistics, one value per trajectory, in the canonical order of the step."""

    field: str
    span: str
    layout: str
    lists: dict[str, np.ndarray]

    def rows(self, order: np.ndarray) -> dict[str, np.ndarray]:
        return {name: values[order] for name, values in self.lists.items()}


def _powers(count: int) -> np.ndarray:
    table, value = np.empty(count, dtype=np.uint64), 1
    for i in range(count):
        table[i] = value
        value = value * R % MODULUS
    return table


_POWERS = _powers(4096)


class Trajectories:
    """One step's trajectories, padding rows last, in their canonical order."""

    def __init__(self, run_id: str, number: int, size: Size, rng: np.random.Generator) -> None:
        self.run_id, self.number, self.size, self.rng = run_id, number, size, rng
        self.uids = [str(uuid.UUID(bytes=rng.bytes(16), version=4)) for _ in range(size.prompts)]
        self.real = size.prompts * size.sessions
        pads = [f"pad{uuid.UUID(bytes=rng.bytes(16)).hex}" for _ in range(size.padding)]
        keys = [f"{uid}_{session}_0" for uid in self.uids for session in range(size.sessions)]
        self.keys = np.array(keys + [f"{uid}_0_0" for uid in pads], dtype=object)
        self.row_uids = [uid for uid in self.uids for _ in range(size.sessions)] + pads
        self.total = len(self.keys)
        self.is_padding = np.arange(self.total) >= self.real
        self.slots = np.arange(self.total) + 10_000
        self.contents: dict[str, Content] = {}
        self._draw()

    def _fp(self) -> np.ndarray:
        return self.rng.integers(0, MODULUS, self.total, dtype=np.uint64)

    def _draw(self) -> None:
        rng, total, pad = self.rng, self.total, self.is_padding
        groups = self.size.prompts + self.size.padding
        # the sessions of a group have one prompt, a padding row has its own
        group = np.concatenate([np.repeat(np.arange(self.size.prompts), self.size.sessions),
                                np.arange(self.size.prompts, groups)])  # fmt: skip
        self.prompt_len = rng.integers(20, 60, groups)[group]
        self.response_len = np.where(pad, 1, rng.integers(8, 64, total))
        self.seq_len = self.prompt_len + self.response_len
        self.policy_len = np.where(pad, 0, self.response_len - rng.integers(0, 4, total))
        self.mask_fp = self._fp()
        self.score = np.where(pad, 0.0, rng.integers(0, 3, total) / 2.0)
        grouped = self.score[: self.real].reshape(-1, self.size.sessions)
        spread = grouped.std(axis=1, ddof=1, keepdims=True) if self.size.sessions > 1 else np.ones((len(grouped), 1))
        self.advantage = np.zeros(total)
        self.advantage[: self.real] = ((grouped - grouped.mean(axis=1, keepdims=True)) / (spread + 1e-6)).reshape(-1)
        prompts, responses = self._fp()[group], self._fp()
        self._tokens("prompts", "prompt", self.prompt_len, prompts)
        self._tokens("responses", "response", self.response_len, responses, masked=True)
        self._mask("response_mask")
        self._mask("loss_mask")
        self._tokens("input_ids", "sequence", self.seq_len, prompts + _POWERS[self.prompt_len] * responses)
        lengths = pa.array(self.seq_len)
        ones = repeated(pa.array(np.ones(total, dtype=np.int64)), lengths)
        self._tokens("attention_mask", "sequence", self.seq_len, ones.to_numpy())
        self._tokens("position_ids", "sequence", self.seq_len, counting(lengths).to_numpy())
        self._values("rm_scores", self.score, only_last=True)
        for name in ("rollout_log_probs", "old_log_probs", "entropy", "ref_log_prob", "log_probs"):
            self._values(name, -rng.random(total) * self.policy_len)
        for name in ("old.log_probs", "old.entropy", "ref.log_probs"):
            self._tokens(name, "sequence", self.seq_len, self._fp())
        for name in ("token_level_scores", "token_level_rewards"):  # no KL in the reward: one content
            self.contents[name] = replace(self.contents["rm_scores"], field=name)
        self._values("advantages", self.advantage * self.policy_len, each=self.advantage)
        self._values("returns", self.advantage * self.policy_len, each=self.advantage)
        uids = fingerprint_strings(list(self.row_uids))
        lengths = np.array([len(uid) for uid in self.row_uids])
        self._object("uid", lengths, uids)
        self._object("raw_prompt", rng.integers(10, 50, total)[group], self._fp()[group])
        for name in ("reward_model", "data_source", "extra_fields", "multi_modal_inputs"):
            self._object(name, rng.integers(10, 50, total), self._fp())
        turns = np.where(pad, 0, 2)
        self.turns = turns
        self._scalar("num_turns", turns)
        self._scalar("prompt_len", self.prompt_len)
        self._scalar("response_len", self.response_len)
        self._scalar("seq_len", self.seq_len)

    def _tokens(self, name: str, span: str, length: np.ndarray, fp: np.ndarray, masked: bool = False) -> None:
        lists = {"length": length, "valid_length": length, "fingerprint": fp, "sum": length * 7.0, "nnz": length}
        if masked:
            lists |= {"mask_sum": self.policy_len, "mask_fingerprint": self.mask_fp}
        self.contents[name] = Content(name.split(".")[-1], span, "jagged", lists)

    def _mask(self, name: str) -> None:
        one = np.where(self.policy_len > 0, 1.0, np.nan)
        self.contents[name] = Content(
            name,
            "response",
            "jagged",
            {
                "length": self.response_len,
                "valid_length": self.response_len,
                "fingerprint": self.mask_fp,
                "mask_sum": self.policy_len,
                "mask_fingerprint": self.mask_fp,
                "sum": self.policy_len * 1.0,
                "nnz": self.policy_len,
                "sum_in": self.policy_len * 1.0,
                "sum_sq_in": self.policy_len * 1.0,
                "min_in": one,
                "max_in": one,
                "nnz_out": np.zeros(self.total, dtype=np.int64),
            },
        )

    def _values(self, name: str, total: np.ndarray, each: np.ndarray | None = None, only_last: bool = False) -> None:
        value = each if each is not None else total
        empty = self.policy_len == 0
        zero = np.zeros(self.total)
        nnz = np.where(total != 0, 1 if only_last else self.policy_len, 0)
        self.contents[name] = Content(
            name,
            "response",
            "jagged",
            {
                "length": self.response_len,
                "valid_length": self.response_len,
                "fingerprint": self._fp(),
                "mask_sum": self.policy_len,
                "mask_fingerprint": self.mask_fp,
                "sum": total,
                "sum_in": total,
                "sum_sq_in": value * value * self.policy_len,
                "min_in": np.where(empty, np.nan, value),
                "max_in": np.where(empty, np.nan, value),
                "nnz": nnz,
                "last_nnz": np.where(nnz > 0, self.response_len - 1.0, np.nan),
                "nnz_out": np.zeros(self.total, dtype=np.int64),
                "max_abs_out": zero,
                "nonfinite": np.zeros(self.total, dtype=np.int64),
                "nonfinite_in": np.zeros(self.total, dtype=np.int64),
            },
        )

    def _object(self, name: str, length: np.ndarray, fp: np.ndarray) -> None:
        lists = {"length": length, "valid_length": length, "fingerprint": fp}
        self.contents[name] = Content(name, "scalar", "object", lists)

    def _scalar(self, name: str, value: np.ndarray) -> None:
        one = np.ones(self.total, dtype=np.int64)
        lists = {"length": one, "valid_length": one, "fingerprint": self._fp()}
        self.contents[name] = Content(name, "scalar", "scalar", lists | {"sum": value * 1.0, "first": value * 1.0})
