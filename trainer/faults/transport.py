"""Faults of what carries rows from part to part: containers that share, casts that stay, fields of another batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict

from lineage import hooks
from lineage.trainer.faults.registry import Seams, fault
from lineage.trainer.faults.seams import TOOLS
from lineage.trainer.protocol import nested_from_list
from lineage.trainer.training import rows_of

GET = "lineage.trainer.queue.local.LocalTransferQueue.kv_batch_get"


@fault("QUE003", "advantage", reports=["verl-getstate-mutates-batch"])
def serialising_casts_the_batch() -> Seams:
    """A batch is made compact before it is pickled, and the compact copy is assigned to the live object: what was only
    to be read has lost its precision."""

    def get(original: Any, queue: Any, keys: Any, partition: str, *rest: Any) -> TensorDict:
        data = original(queue, keys, partition, *rest)
        if hooks.current().name == "ref_log_prob" and "old_log_probs" in data.keys():  # noqa: SIM118
            for row in queue._partitions[partition].values():
                row.values["old_log_probs"] = row.values["old_log_probs"].bfloat16().float()
        return data

    return {GET: get}


@fault("QUE003", "update_actor", reports=["trl-replay-buffer-1d-vs-2d"])
def tokens_replayed_without_their_advantages() -> Seams:
    """A replay buffer puts an earlier group's tokens in the place of one without reward; the decision and the
    advantages were made a row at a time, so the other rows keep theirs."""

    def get(original: Any, queue: Any, keys: Any, partition: str, *rest: Any) -> TensorDict:
        data = original(queue, keys, partition, *rest)
        if hooks.current().name == "update_actor":
            rows = rows_of(data["input_ids"])
            data["input_ids"] = nested_from_list([*map(_filled, rows[:2], rows[2:4]), *rows[2:]])
        return data

    return {GET: get}


def _filled(row: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The other row, cut or filled up to the length of this one."""
    return torch.nn.functional.pad(other[: len(row)], (0, max(0, len(row) - len(other))))


@fault("MSK002", "update_actor", reports=["unsloth-batch-size-not-num-generations"])
def mask_of_another_micro_batch() -> Seams:
    """The loss is a closure over the mask of the first micro-batch: later ones train under it, cut or filled up to
    their own lengths."""
    first: list[torch.Tensor] = []

    def backward(original: Any, worker: Any, rows: Any, *rest: Any) -> Any:
        masks = rows.columns["loss_mask"]
        first.extend(masks if not first else [])
        fitted = [_filled(mask, first[place % len(first)]) for place, mask in enumerate(masks)]
        return original(worker, replace(rows, columns={**rows.columns, "loss_mask": fitted}), *rest)

    return {"lineage.trainer.training.TrainingWorker._backward": backward}


@fault("TOK003", "rollout", *TOOLS, "actor_rollout_ref.rollout.n=8", reports=["trl-server-stride-dedup-in-tool-loop"])
def prompts_by_stride() -> Seams:
    """The engine is sent every n-th prompt with n samples each: after a tool's turn the rows of a group are no longer
    alike, and a row gets the answer to another one's history."""

    def generate(original: Any, engine: Any, requests: list[Any], params: Any) -> Any:
        sent = [replace(one, prompt_ids=requests[place - place % 2].prompt_ids) for place, one in enumerate(requests)]
        return original(engine, sent, params)

    return {"lineage.trainer.rollout.hf.HFRollout._generate": generate}


@fault("MSK006", "rollout", *TOOLS, reports=["prime-truncated-flags-longer-than-batch"])
def flags_by_turn() -> Seams:
    """What the engine says of each turn is appended a turn, not a rollout, and zipped with the rollouts: the flags of
    all rows after the first with two turns are another row's."""
    flags: list[tuple[Any, Any]] = []

    def tag(original: Any, output: Any, global_steps: int) -> dict[str, Any]:
        made = original(output, global_steps)
        flags.extend([(made["finish_reason"], made["generated"])] * max(1, output.num_turns // 2))
        reason, generated = flags.pop(0)
        return {**made, "finish_reason": reason, "generated": generated}

    return {"lineage.trainer.agent_loop.worker.trajectory_tag": tag}


@fault("LOS005", "metrics", "+experiment=merged_steps", "data.train_batch_size=4", reports=["verl-concat-drops-meta"])
def metrics_of_the_first_part() -> Seams:
    """Several parts are joined with the first one's meta information: the metrics of the others are lost."""
    return {"lineage.trainer.grpo.aggregate_metrics": lambda _, parts, samples: dict(parts[0])}
