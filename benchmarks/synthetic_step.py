"""One synthetic step: trajectories drawn at random, lawful, and said as the rows of ``docs/trace.md``."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lineage.fingerprint import fingerprint_strings

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


class Step:
    """Draws one step's trajectories and says them as rows."""

    def __init__(self, run_id: str, number: int, size: Size, rng: np.random.Generator) -> None:
        self.run_id, self.number, self.size, self.rng = run_id, number, size, rng
        self.rows: list[Row] = []
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
        self.prompt_len = rng.integers(20, 60, total)
        self.response_len = np.where(pad, 1, rng.integers(8, 64, total))
        self.seq_len = self.prompt_len + self.response_len
        self.policy_len = np.where(pad, 0, self.response_len - rng.integers(0, 4, total))
        self.mask_fp = self._fp()
        self.score = np.where(pad, 0.0, rng.integers(0, 3, total) / 2.0)
        grouped = self.score[: self.real].reshape(-1, self.size.sessions)
        spread = grouped.std(axis=1, ddof=1, keepdims=True) if self.size.sessions > 1 else np.ones((len(grouped), 1))
        self.advantage = np.zeros(total)
        self.advantage[: self.real] = ((grouped - grouped.mean(axis=1, keepdims=True)) / (spread + 1e-6)).reshape(-1)
        prompts, responses = self._fp(), self._fp()
        self._tokens("prompts", "prompt", self.prompt_len, prompts)
        self._tokens("responses", "response", self.response_len, responses, masked=True)
        self._mask("response_mask")
        self._mask("loss_mask")
        self._tokens("input_ids", "sequence", self.seq_len, prompts + _POWERS[self.prompt_len] * responses)
        self._tokens("attention_mask", "sequence", self.seq_len, self._fp())
        self._tokens("position_ids", "sequence", self.seq_len, self._fp())
        self._values("rm_scores", self.score, only_last=True)
        for name in ("rollout_log_probs", "old_log_probs", "entropy", "ref_log_prob", "log_probs"):
            self._values(name, -rng.random(total) * self.policy_len)
        for name in ("old.log_probs", "old.entropy", "ref.log_probs"):
            self._tokens(name, "sequence", self.seq_len, self._fp())
        self._values("token_level_scores", self.score, only_last=True)
        self._values("token_level_rewards", self.score, only_last=True)
        self._values("advantages", self.advantage * self.policy_len, each=self.advantage)
        self._values("returns", self.advantage * self.policy_len, each=self.advantage)
        uids = fingerprint_strings(list(self.row_uids))
        lengths = np.array([len(uid) for uid in self.row_uids])
        self._object("uid", lengths, uids)
        for name in ("raw_prompt", "reward_model", "data_source", "extra_fields", "multi_modal_inputs"):
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

    # -- saying it ---------------------------------------------------------------------------------------------

    def say(self, stage: str, op: str, name: str, entity: str = "trajectory", **columns: Any) -> Row:
        """Append one row; array and list values are list columns, everything else scalars."""
        lists = {key: value for key, value in columns.items() if isinstance(value, (np.ndarray, list))}
        scalars = {key: value for key, value in columns.items() if key not in lists}
        lists = {_LISTED.get(key, key): value for key, value in lists.items()}
        row = Row(stage, op, name, entity, {"global_steps": self.number} | scalars, lists)
        self.rows.append(row)
        return row

    def content(self, stage: str, op: str, name: str, order: np.ndarray, queue: bool = False, **columns: Any) -> Row:
        """Append one row of a field's content for the trajectories in ``order``."""
        content = self.contents[name]
        lists: dict[str, Any] = {"key": self.keys[order], **content.rows(order)}
        if queue:
            lists["slot"] = self.slots[order]
            columns["partition"] = "train"
        if queue and op == "consume":
            columns |= {"asked_n": len(order)}
        base = {"span": content.span, "layout": content.layout, "dtype": "float32", "device": "cpu"}
        row = self.say(stage, op, content.field, **(base | columns))
        row.lists |= lists
        return row

    def many(self, stage: str, op: str, names: tuple[str, ...], order: np.ndarray, **columns: Any) -> None:
        for name in names:
            self.content(stage, op, name, order, **columns)

    def tags(self, order: np.ndarray) -> dict[str, np.ndarray]:
        ones = np.ones(len(order), dtype=np.int64)
        return {
            "key": self.keys[order],
            "is_padding": self.is_padding[order],
            "global_steps_tag": ones * self.number,
            "min_global_steps": ones * (self.number - 1),
            "max_global_steps": ones * (self.number - 1),
        }

    def play(self) -> list[Row]:
        """All rows of the step, in order."""
        rng, size = self.rng, self.size
        produced = rng.permutation(self.real)
        pads = np.arange(self.real, self.total)
        order = rng.permutation(self.total)
        self._prompt_and_rollout(produced)
        sampled = np.arange(self.real)
        self._sample_and_balance(sampled, pads, order)
        self._log_probs(order)
        self._advantage(order)
        self._update(order, size)
        self._end(order)
        return self.rows

    def _prompt_and_rollout(self, produced: np.ndarray) -> None:
        size, uids = self.size, np.array(self.uids, dtype=object)
        index = np.arange(size.prompts) + self.number * size.prompts
        names = np.array([str(i) for i in index], dtype=object)
        source = np.array(["synthetic"] * size.prompts, dtype=object)
        for name in ("raw_prompt", "data_source", "reward_model", "extra_info", "index", "dummy_tensor"):
            self.say("dataset", "produce", name, "dataset_row", key=names, source_index_list=index, data_source=source)
        expected = np.full(size.prompts, size.sessions)
        self.say(
            "prompt",
            "produce",
            "uid",
            "prompt",
            key=uids,
            source_index_list=index,
            data_source=source,
            expected=expected,
        )
        slots = np.arange(size.prompts)
        tag = {"partition": "train", "slot": slots, "key": uids, "expected": expected}
        self.say("prompt", "tag", "status", "prompt", status=["pending"] * size.prompts, **tag)
        self.say("rollout", "consume", "raw_prompt", "prompt", key=uids)
        twice = {"partition": "train", "slot": np.tile(slots, 2), "key": np.tile(uids, 2)}
        self.say(
            "rollout",
            "tag",
            "status",
            "prompt",
            status=["running"] * size.prompts + ["finished"] * size.prompts,
            **twice,
        )
        requests = np.array([f"r{i}" for i in produced], dtype=object)
        for name, length in (("prompts", self.prompt_len), ("responses", self.response_len)):
            self.say(
                "rollout",
                "generate",
                name,
                "request",
                key=requests,
                length=length[produced],
                valid_length=length[produced],
                generated=self.policy_len[produced],
                finish_reason=["stop"] * len(produced),
            )
        self.content("reward", "consume", "responses", produced)
        self.say(
            "reward",
            "score",
            "rm_scores",
            key=self.keys[produced],
            sum=self.score[produced],
            length=np.ones(len(produced), dtype=np.int64),
            layout="scalar",
            span="scalar",
        )
        self.many("rollout", "produce", ROLLOUT_FIELDS, produced, queue=True, producer="agent_loop")
        row = self.say(
            "rollout", "tag", "status", status=["success"] * len(produced), partition="train", slot=self.slots[produced]
        )
        row.lists |= self.tags(produced)
        self.many("rollout", "tag", LENGTH_TAGS, produced, queue=True)

    def _sample_and_balance(self, sampled: np.ndarray, pads: np.ndarray, order: np.ndarray) -> None:
        uids = np.array(self.uids, dtype=object)
        self.say("sample", "filter", "status", "prompt", key=uids, status=["finished"] * len(uids))
        self.say(
            "sample",
            "clear",
            "status",
            "prompt",
            key=uids,
            partition="train",
            slot=np.arange(len(uids)),
            resident={"prompts": 0, "trajectories": self.real, "bytes": 0},
        )
        self.say("sample", "produce", "key", container="KVBatchMeta").lists |= self.tags(sampled)
        if len(pads):
            self.many("balance", "produce", ROLLOUT_FIELDS, pads, queue=True, producer="balance")
            row = self.say(
                "balance", "tag", "status", status=["success"] * len(pads), partition="train", slot=self.slots[pads]
            )
            row.lists |= self.tags(pads)
            self.many("balance", "tag", LENGTH_TAGS, pads, queue=True)
            self.say("balance", "pad", "key").lists |= self.tags(pads)
        row = self.say("balance", "reorder", "key")
        row.lists |= self.tags(order) | {"source_index": order}

    def _log_probs(self, order: np.ndarray) -> None:
        get: dict[str, Any] = {"queue": True, "consumer": "actor"}
        self.many("old_log_prob", "consume", ROLLOUT_FIELDS, order, **get)
        self.many("old_log_prob", "forward", ("old.log_probs", "old.entropy"), order)
        self.many("old_log_prob", "produce", ("old.log_probs", "old.entropy"), order, queue=True, producer="actor")
        self.many("old_log_prob", "produce", ("old_log_probs", "entropy"), order, queue=True, producer="driver")
        self._compare("old_log_prob", "old_log_probs", "rollout_log_probs", order)
        self.many("ref_log_prob", "consume", (*ROLLOUT_FIELDS, "old_log_probs"), order, **get)
        self.content("ref_log_prob", "forward", "ref.log_probs", order)
        self.content("ref_log_prob", "produce", "ref.log_probs", order, queue=True, producer="ref")
        self.content("ref_log_prob", "produce", "ref_log_prob", order, queue=True, producer="driver")
        self._compare("ref_log_prob", "ref_log_prob", "old_log_probs", order)

    def _compare(self, stage: str, name: str, against: str, order: np.ndarray) -> None:
        zero = np.zeros(len(order))
        self.say(
            stage,
            "compare",
            name,
            against=against,
            key=self.keys[order],
            absdiff_sum=zero,
            absdiff_max=zero,
            n_in=self.policy_len[order],
            span="response",
        )

    def _advantage(self, order: np.ndarray) -> None:
        names = ("uid", "response_mask", "rm_scores", "rollout_log_probs", "old_log_probs", "ref_log_prob")
        self.many("advantage", "consume", names, order, queue=True, consumer="advantage")
        dense: dict[str, Any] = {"layout": "dense", "container": "DataProto"}
        width = np.full(len(order), self.response_len.max())
        for op, fields in (("pad", names[1:]), ("forward", ADVANTAGE_FIELDS)):
            for name in fields:
                self.content("advantage", op, name, order, **dense).lists["length"] = width
        self.many("advantage", "unpad", ("advantages", "returns"), order)
        self.many("advantage", "produce", ("advantages", "returns"), order, queue=True, producer="advantage")

    def _update(self, order: np.ndarray, size: Size) -> None:
        names = (*ROLLOUT_FIELDS, "old_log_probs", "ref_log_prob", "advantages", "returns")
        self.many("update_actor", "consume", names, order, queue=True, consumer="actor")
        for dp, part in enumerate(np.array_split(order, size.dp)):
            self.say("update_actor", "dispatch", "key", key=self.keys[part], coord={"dp": dp})
        topology = {
            "backend": "fsdp",
            "world_size": size.dp,
            "reported_dp": size.dp,
            "fsdp_size": -1,
            "sp": 1,
            "rollout_tp": 1,
            "rollout_dp": size.dp,
        }
        for mini, rows in enumerate(np.array_split(order, size.mini_batches)):
            attrs = [("global_batch_size", str(len(rows))), ("dp_size", str(size.dp))]
            where: dict[str, Any] = {"ppo_epoch": 0, "mini_batch": mini, "update_index": mini}
            self.say("update_actor", "split", "key", key=self.keys[rows], topology=topology, map_attrs=attrs, **where)
            for micro, part in enumerate(np.array_split(rows, size.micro_batches)):
                where["micro_batch"] = micro
                self.say("update_actor", "split", "key", key=self.keys[part], map_attrs=attrs, **where)
                self.content("update_actor", "forward", "log_probs", part, **where)
                loss = {
                    "term": "pg",
                    "mode": "token-mean",
                    "numerator": 0.0,
                    "denominator": float(self.policy_len[rows].sum()),
                    "rows": len(part),
                }
                self.say("update_actor", "produce", "loss", "metric", loss=loss, **where)
            where["micro_batch"] = None
            optim = {"lr": 1e-6, "grad_norm": 0.5, "clip": 1.0, "skipped": False}
            self.say("update_actor", "optim_step", "grad_norm", "metric", optim=optim, **where)

    def _end(self, order: np.ndarray) -> None:
        weights = {"version": self.number, "cache_epoch": self.number}
        names = np.array([f"layer.{i}" for i in range(16)], dtype=object)
        fp = self.rng.integers(0, MODULUS, 16, dtype=np.uint64)
        for op in ("sleep", "wake", "cache_reset"):
            self.say("weight_sync", op, "rollout", "metric", weights=weights)
        for phase in ("actor", "engine"):
            self.say(
                "weight_sync",
                "sync",
                "parameters",
                "param",
                weights=weights | {"phase": phase},
                key=names,
                fingerprint=fp,
            )
        names_read = ("advantages", "num_turns", "prompts", "response_mask", "responses", "returns", "rm_scores")
        self.many("metrics", "consume", names_read, order, queue=True, consumer="metrics")
        metrics = self.metrics()
        self.say(
            "metrics",
            "produce",
            "metrics",
            "metric",
            key=np.array(list(metrics), dtype=object),
            sum=np.array(list(metrics.values())),
            map_attrs=[("over", "real")],
        )
        self.say(
            "clear",
            "clear",
            "status",
            key=self.keys[order],
            partition="train",
            slot=self.slots[order],
            resident={"prompts": 0, "trajectories": 0, "bytes": 0},
        )

    def metrics(self) -> dict[str, float]:
        """The step's metrics under verl's names, over real rows."""
        real = ~self.is_padding
        out: dict[str, float] = {}
        for name, values in (
            ("critic/score", self.score[real]),
            ("critic/rewards", self.score[real]),
            ("response_length", self.response_len[real]),
            ("prompt_length", self.prompt_len[real]),
            ("num_turns", self.turns[real]),
        ):
            out |= {
                f"{name}/mean": float(values.mean()),
                f"{name}/max": float(values.max()),
                f"{name}/min": float(values.min()),
            }
        for name in ("critic/advantages", "critic/returns"):
            total = float((self.advantage * self.policy_len)[real].sum())
            held = self.advantage[real & (self.policy_len > 0)]
            out |= {
                f"{name}/mean": total / float(self.policy_len[real].sum()),
                f"{name}/max": float(held.max()),
                f"{name}/min": float(held.min()),
            }
        return out


# A list column whose name is also a keyword here or a scalar column elsewhere.
_LISTED = {"source_index_list": "source_index"}
ROLLOUT_FIELDS = (
    "prompts", "responses", "response_mask", "loss_mask", "input_ids", "attention_mask", "position_ids", "rm_scores",
    "rollout_log_probs", "uid", "raw_prompt", "reward_model", "data_source", "num_turns", "extra_fields",
    "multi_modal_inputs",
)  # fmt: skip
LENGTH_TAGS = ("prompt_len", "response_len", "seq_len")
ADVANTAGE_FIELDS = ("token_level_scores", "token_level_rewards", "advantages", "returns")
