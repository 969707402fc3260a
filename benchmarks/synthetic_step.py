"""One synthetic step said as the rows of ``docs/trace.md``, stage by stage."""

from __future__ import annotations

from typing import Any

import numpy as np
from synthetic_content import MODULUS, Row, Size, Trajectories


class Step(Trajectories):
    """Says one step's trajectories as rows."""

    def __init__(self, run_id: str, number: int, size: Size, rng: np.random.Generator) -> None:
        super().__init__(run_id, number, size, rng)
        self.rows: list[Row] = []

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
        base = {"span": content.span, "layout": content.layout, "device": "cpu"}
        base["dtype"] = "int64" if name in WHOLE_NUMBERS else "float32"
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
        order = self._balanced()
        self._prompt_and_rollout(produced)
        sampled = np.arange(self.real)
        self._sample_and_balance(sampled, pads, order)
        self._log_probs(order)
        self._advantage(order)
        self._update(order, size)
        self._end(order)
        return self.rows

    def _balanced(self) -> np.ndarray:
        """All rows as they are dealt: longest first, to the ranks there and back, and mixed on each rank."""
        at, dp = np.arange(self.total), self.size.dp
        rank = np.where(at // dp % 2, dp - 1 - at % dp, at % dp)
        longest = np.argsort(-self.seq_len, kind="stable")
        return np.concatenate([self.rng.permutation(longest[rank == one]) for one in range(dp)])

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
                weights=self.engine(),
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
        topology = size.topology()
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
        self.say("weight_sync", "sleep", "rollout", "metric", weights=self.engine())
        names = np.array([f"layer.{i}" for i in range(16)], dtype=object)
        params = {"key": names, "fingerprint": self.rng.integers(0, MODULUS, 16, dtype=np.uint64)}
        params |= {name: np.full(16, 64) for name in ("length", "valid_length")}
        loaded = self.engine() | {"version": self.number}
        for weights in ({"version": self.number, "phase": "actor"}, loaded):
            self.say("weight_sync", "sync", "parameters", "param", weights=weights, **params)
        for op in ("cache_reset", "wake"):
            fresh = loaded | {"cache_epoch": self.number + 1}
            self.say("weight_sync", op, "rollout", "metric", weights=fresh)
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

    def engine(self) -> dict[str, Any]:
        """The rollout's weights while it generates."""
        return {"version": self.number - 1, "phase": "engine", "cache_epoch": self.number}

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
WHOLE_NUMBERS = frozenset(
    {"prompts", "responses", "input_ids", "position_ids", "attention_mask", "response_mask", "loss_mask"}
)
ROLLOUT_FIELDS = (
    "prompts", "responses", "response_mask", "loss_mask", "input_ids", "attention_mask", "position_ids", "rm_scores",
    "rollout_log_probs", "uid", "raw_prompt", "reward_model", "data_source", "num_turns", "extra_fields",
    "multi_modal_inputs",
)  # fmt: skip
LENGTH_TAGS = ("prompt_len", "response_len", "seq_len")
ADVANTAGE_FIELDS = ("token_level_scores", "token_level_rewards", "advantages", "returns")
