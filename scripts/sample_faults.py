"""The faults of the bad samples: one for each code, of the kind public trainers had.

A fault replaces functions of the reference trainer at a seam, in one step of a real run. Each is a function that
returns ``{seam: replacement}``; a replacement gets the function it replaces and that function's own arguments.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lineage import hooks
from lineage.trainer.models import find_model, load_tokenizer
from lineage.trainer.protocol import KVBatchMeta, nested_from_list
from lineage.trainer.training import rows_of

Seams = dict[str, Callable[..., Any]]
MakeSeams = Callable[[], Seams]

TRAJECTORY_FIELDS = "lineage.trainer.agent_loop.worker.trajectory_fields"
TRAINER = "lineage.trainer.grpo.PPOTrainerSync"


@dataclass(frozen=True)
class Fault:
    """One fault, and what a check must say of it.

    Attributes:
        code: the invariant it breaks first.
        name: the function below.
        stage: the stage to be blamed.
        says: what went wrong, in a sentence.
        seams: makes the replacements; called once a run, so they may share state.
        step: step of the run in which they act.
        overrides: configuration the fault needs.
    """

    code: str
    name: str
    stage: str
    says: str
    seams: MakeSeams
    step: int
    overrides: tuple[str, ...]

    @contextmanager
    def inject(self) -> Iterator[None]:
        """Replace the seams for a ``with`` block."""
        with ExitStack() as stack:
            for seam, replacement in self.seams().items():
                original = resolve_name(seam)
                if isinstance(original, property):
                    stack.enter_context(patch(seam, property(_in_step(self.step, original.fget, replacement))))
                else:
                    stack.enter_context(patch(seam, _in_step(self.step, original, replacement)))
            yield


FAULTS: dict[str, Fault] = {}


def fault(code: str, stage: str, *overrides: str, step: int = 2) -> Callable[[MakeSeams], MakeSeams]:
    """Register a function as the fault of a code; its docstring is the sentence."""

    def register(seams: MakeSeams) -> MakeSeams:
        says = " ".join((seams.__doc__ or "").split())
        FAULTS[code] = Fault(code, seams.__name__, stage, says, seams, step, overrides)
        return seams

    return register


def _in_step(step: int, original: Any, replacement: Callable[..., Any]) -> Callable[..., Any]:
    """``replacement`` in one step of the run, the original in the others."""

    @functools.wraps(original)
    def either(*args: Any, **options: Any) -> Any:
        if hooks.recorder().global_steps != step:
            return original(*args, **options)
        return replacement(original, *args, **options)

    return either


@functools.cache
def _tokenizer() -> Any:
    return load_tokenizer(find_model("tiny"))


def _not_eos(ids: Tensor) -> Tensor:
    """What many trainers take for a mask: 1 wherever the token is not the padding token, which is the eos token."""
    return (ids != _tokenizer().eos_token_id).to(torch.int64)


# --------------------------------------------------------------------------------------------------------- identity


@fault("KEY001", "rollout")
def uid_of_the_first_group() -> Seams:
    """The uid column is filled from the first row of the batch: groups are written with another group's uid."""
    first: list[str] = []

    def write(original: Any, uid: str, *rest: Any) -> TensorDict:
        first.append(uid)
        return original(first[0], *rest)

    return {TRAJECTORY_FIELDS: write}


@fault("KEY002", "sample")
def lost_session() -> Seams:
    """The replay buffer forgets one session of a group: the step trains on what is left and says nothing."""

    async def materialize(original: Any, buffer: Any, uids: list[str], *rest: Any) -> KVBatchMeta:
        buffer._outputs[uids[-1]].pop()
        return await original(buffer, uids, *rest)

    return {"lineage.trainer.replay_buffer.ReplayBuffer._materialize_batch": materialize}


@fault("KEY003", "balance")
def tags_left_behind() -> Seams:
    """The balance reorders the keys of the batch and leaves their tags where they were."""

    def reorder(original: Any, batch: KVBatchMeta, order: list[int]) -> None:
        tags = list(batch.tags)
        original(batch, order)
        batch.tags = tags

    return {"lineage.trainer.protocol.KVBatchMeta.reorder": reorder}


# ---------------------------------------------------------------------------------------------------------- lengths


@fault("LEN001", "rollout")
def short_log_probs() -> Seams:
    """The engine returns the log-probs of all tokens but the last; whoever reads them pads, so nothing crashes."""

    def write(original: Any, *args: Any) -> TensorDict:
        fields = original(*args)
        fields["rollout_log_probs"] = nested_from_list([row[:-1] for row in rows_of(fields["rollout_log_probs"])])
        return fields

    def read(original: Any, queue: Any, batch: KVBatchMeta, names: list[str]) -> TensorDict:
        data = original(queue, batch, names)
        if "rollout_log_probs" in names:
            pairs = zip(rows_of(data["rollout_log_probs"]), rows_of(data["response_mask"]), strict=True)
            padded = [torch.nn.functional.pad(row, (0, len(mask) - len(row))) for row, mask in pairs]
            data["rollout_log_probs"] = nested_from_list(padded)
        return data

    return {
        TRAJECTORY_FIELDS: write,
        "lineage.trainer.stages.log_prob.fetch": read,
        "lineage.trainer.stages.advantage.fetch": read,
    }


@fault("LEN002", "rollout")
def truncated_input_ids() -> Seams:
    """The sequence is cut to a model length one token short, after prompt and response were written whole."""

    def write(original: Any, *args: Any) -> TensorDict:
        fields = original(*args)
        limit = max(len(row) for row in rows_of(fields["input_ids"])) - 1
        for name in ("input_ids", "attention_mask", "position_ids"):
            fields[name] = nested_from_list([row[:limit] for row in rows_of(fields[name])])
        return fields

    return {TRAJECTORY_FIELDS: write}


@fault("LEN003", "advantage")
def padding_loses_the_last_value() -> Seams:
    """The padded container is filled up to width - 1, a slice meant for shifted logits: the longest rows lose their
    last value, the reward among them."""

    def pad(original: Any, nested: Tensor, **options: Any) -> Tensor:
        padded = original(nested, **options)
        padded[:, -1] = 0
        return padded

    return {"lineage.trainer.protocol.nested_to_padded": pad}


# ---------------------------------------------------------------------------------------------------- masks, tokens


@fault("MSK001", "rollout")
def loss_mask_by_token() -> Seams:
    """The loss mask is built as ``ids != pad`` with pad = eos: the token that ends a response does not train."""

    def write(original: Any, *args: Any) -> TensorDict:
        fields = original(*args)
        fields["loss_mask"] = nested_from_list([_not_eos(ids) for ids in rows_of(fields["responses"])])
        return fields

    return {TRAJECTORY_FIELDS: write}


@fault("MSK002", "update_actor")
def mask_rebuilt_in_the_update() -> Seams:
    """The actor does not use the mask it read: it builds one from the token ids of its own batch."""

    def read(original: Any, *args: Any) -> Any:
        rows = original(*args)
        if "loss_mask" not in rows.columns:
            return rows
        pairs = zip(rows.columns["input_ids"], rows.columns["loss_mask"], strict=True)
        rows.columns["loss_mask"] = masks = [_not_eos(ids[-len(mask) :]) for ids, mask in pairs]
        return replace(rows, tokens=[int(mask.sum()) for mask in masks])

    return {"lineage.trainer.actor.ActorRolloutRefWorker._rows": read}


@fault("TOK001", "rollout")
def retokenised_input_ids() -> Seams:
    """The sequence is decoded to text, normalised and encoded again: as many tokens, and others."""

    # a subword tokenizer drifts without a normaliser; the tiny one has a token a character, so lower case does it
    def write(original: Any, *args: Any) -> TensorDict:
        fields, tokenizer = original(*args), _tokenizer()
        texts = [tokenizer.decode(ids) for ids in rows_of(fields["input_ids"])]
        encoded = [tokenizer.encode(text.lower(), add_special_tokens=False) for text in texts]
        fields["input_ids"] = nested_from_list([torch.tensor(ids) for ids in encoded])
        return fields

    return {TRAJECTORY_FIELDS: write}


# ---------------------------------------------------------------------------------- advantages, batches and padding


@fault("ADV001", "advantage")
def advantages_not_masked() -> Seams:
    """The score of a session is broadcast over the whole padded response, without the mask."""

    def estimate(original: Any, scores: Tensor, mask: Tensor, *rest: Any, **options: Any) -> Any:
        return original(scores, torch.ones_like(mask), *rest, **options)

    return {"lineage.trainer.stages.advantage.compute_advantage": estimate}


@fault("BAT001", "update_actor", "actor_rollout_ref.actor.ppo_mini_batch_size=3")
def mini_batch_in_trajectories() -> Seams:
    """ppo_mini_batch_size is not multiplied by rollout.n: mini-batches of 3 trajectories are dealt to 2 ranks."""

    def split(original: Any, worker: Any, rows: int, plan: Any, epoch: int) -> list[list[list[int]]]:
        # the reference trainer refuses such a plan; others deal what there is
        whole = [range(rows)[start : start + plan.mini_batch_size] for start in range(0, rows, plan.mini_batch_size)]
        return [[share.tolist() for share in np.array_split(mini, worker.topology.reported_dp)] for mini in whole]

    return {
        "lineage.trainer.batching.batch_sizes.BatchSizes.mini_batch_rows": lambda _, sizes: sizes.ppo_mini_batch_size,
        "lineage.trainer.training.TrainingWorker._mini_batches": split,
    }


@fault("PAD001", "balance")
def padding_keeps_a_score() -> Seams:
    """A padding row is made from a real one and keeps its reward."""

    def make(original: Any, like: TensorDict, *rest: Any) -> TensorDict:
        fields = original(like, *rest)
        scores = rows_of(fields["rm_scores"])
        scores[0][-1] = like["rm_scores"].values().sum()
        fields["rm_scores"] = nested_from_list(scores)
        return fields

    return {"lineage.trainer.stages.balance.padding_fields": make}


@fault("PAD002", "metrics")
def metrics_over_padding() -> Seams:
    """The metrics are taken over the whole batch: padding rows count as samples of score 0."""

    def compute(original: Any, parts: Any, batch: KVBatchMeta, *rest: Any) -> dict[str, float]:
        tags = [{**tag, "is_padding": False} for tag in batch.tags]
        return original(parts, KVBatchMeta(batch.keys, tags, batch.partition_id), *rest)

    return {"lineage.trainer.grpo.compute_metrics": compute}


# --------------------------------------------------------------------------------------------------------- topology


@fault("TOP001", "init", "trainer.n_gpus_per_node=4", "rollout.tensor_model_parallel_size=2", step=0)
def dp_of_the_rollout() -> Seams:
    """The actor's data-parallel size is taken for world / rollout TP."""

    def report(original: Any, config: Any) -> hooks.Topology:
        topology, tp = original(config), config.actor_rollout_ref.rollout.tensor_model_parallel_size
        dp = topology.world_size // tp
        return replace(topology, reported_dp=dp, rollout_tp=tp, rollout_dp=dp)

    return {"lineage.trainer.setup.topology_of": report}


@fault("TOP003", "init", "rollout.tensor_model_parallel_size=2", step=0)
def one_topology_for_both() -> Seams:
    """One set of parallel sizes is reported for both engines: FSDP is given the rollout's tensor parallelism."""

    def report(original: Any, config: Any) -> hooks.Topology:
        tp = config.actor_rollout_ref.rollout.tensor_model_parallel_size
        return replace(original(config), backend=config.actor_rollout_ref.actor.strategy, tp=tp, rollout_tp=tp)

    return {"lineage.trainer.setup.topology_of": report}


# -------------------------------------------------------------------------------------------------------- the queue


@fault("QUE001", "rollout")
def late_writer() -> Seams:
    """A session that was retried ends after the step was cleared, and writes its group once more."""
    late: list[tuple[contextvars.Context, Callable[[], Any]]] = []

    async def write(original: Any, *args: Any) -> None:
        await original(*args)
        if not late:
            late.append((contextvars.copy_context(), lambda: original(*args)))

    async def step(original: Any, trainer: Any) -> dict[str, float]:
        metrics = await original(trainer)
        for context, again in late:
            await asyncio.create_task(again(), context=context)
        return metrics

    return {
        "lineage.trainer.agent_loop.worker.AgentLoopWorker._agent_loop_postprocess": write,
        f"{TRAINER}.step": step,
    }


@fault("QUE002", "clear")
def padding_is_never_cleared() -> Seams:
    """The step clears the keys it sampled; the padding rows added since stay in the queue."""

    def clear(original: Any, trainer: Any, batch: KVBatchMeta) -> None:
        tagged = zip(batch.keys, batch.tags, strict=True)
        original(trainer, batch.select_keys([key for key, tag in tagged if not tag["is_padding"]]))

    return {f"{TRAINER}._clear": clear}


@fault("QUE003", "update_actor")
def rows_in_slot_order() -> Seams:
    """The queue answers in the order of its slots, not of the keys asked: rows come back under other keys."""

    def get(original: Any, queue: Any, keys: list[str], partition_id: str, *rest: Any) -> TensorDict:
        if hooks.current().name == "update_actor":
            slots = dict(zip(keys, queue.global_indexes(keys, partition_id), strict=True))
            keys = sorted(keys, key=lambda key: slots[key])
        return original(queue, keys, partition_id, *rest)

    return {"lineage.trainer.queue.local.LocalTransferQueue.kv_batch_get": get}
