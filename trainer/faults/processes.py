"""Faults between processes: they exist only where a step is spread over several (``mode=ray``)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from lineage import hooks
from lineage.hooks import Topology, traced
from lineage.trainer.engine.ulysses import SequenceParallel
from lineage.trainer.faults.registry import INCOMPLETE, Seams, fault
from lineage.trainer.protocol import KVBatchMeta, nested_from_list

RAY = ("mode=ray", "trainer.n_gpus_per_node=2")
TRAINED = "lineage.trainer.ray.worker_group.trained_by"
PUT = "lineage.trainer.actor.ActorRolloutRefWorker._put"


@fault("QUE001", "ref_log_prob", *RAY)
def rank_writes_after_the_clear() -> Seams:
    """A rank sends its log-probs once more when its answer was late, and the driver has cleared the step by then."""

    def put(original: Any, worker: Any, batch: KVBatchMeta, columns: Mapping[str, list[Tensor]], *rest: Any) -> None:
        original(worker, batch, columns, *rest)
        if hooks.current().name == "ref_log_prob":
            # on the worker: Ray sends the methods of an actor's class as copies, which share no variable
            worker.late = (batch, {name: nested_from_list(rows) for name, rows in columns.items()})

    def seal(original: Any, process: Any) -> Any:
        if hasattr(process.worker, "late"):
            batch, fields = process.worker.late
            with traced("ref_log_prob", component="ActorRolloutRefWorker.compute_ref_log_prob"):
                process.worker.queue.kv_batch_put(
                    keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(fields, batch_size=[len(batch)])
                )
        return original(process)

    return {PUT: put, "lineage.trainer.ray.rank.RankProcess.seal": seal}


@fault("KEY005", "update_actor", *RAY)
def key_lost_in_dispatch() -> Seams:
    """The last key of the first rank's part is cut off on the way, and one of the next rank's fills the place."""

    def dispatch(original: Any, batch: KVBatchMeta, ranks: int) -> list[KVBatchMeta]:
        parts: list[KVBatchMeta] = original(batch, ranks)
        first = batch.select_keys([*parts[0].keys[:-1], parts[1].keys[0]])
        return [first, *parts[1:]]

    return {TRAINED: dispatch}


@fault("LEN001", "old_log_prob", *RAY)
def ranks_answer_in_another_order() -> Seams:
    """What the ranks computed is joined in the order in which they answered: each part lands under another's keys."""

    def dispatch(original: Any, batch: KVBatchMeta, ranks: int) -> list[KVBatchMeta]:
        parts: list[KVBatchMeta] = original(batch, ranks)
        for part, other in zip(parts, [*parts[1:], parts[0]], strict=True):
            part.extra_info["answers_as"] = other.keys
        return parts

    def put(original: Any, worker: Any, batch: KVBatchMeta, *rest: Any) -> None:
        keys = batch.extra_info["answers_as"]
        original(worker, KVBatchMeta(keys, batch.tags, batch.partition_id, extra_info=batch.extra_info), *rest)

    return {"lineage.trainer.ray.worker_group.scored_by": dispatch, PUT: put}


@fault("BAT001", "update_actor", *RAY)
def mini_batches_cut_unevenly() -> Seams:
    """The first rank takes the remainder of a division that had none: one row more of its first mini-batch."""

    def cut(original: Any, worker: Any, *arguments: Any) -> Iterator[list[list[int]]]:
        minis: list[list[list[int]]] = list(original(worker, *arguments))
        if worker.ranks.first and len(minis) > 1:
            (first,), (second,) = minis[0], minis[1]
            minis[0], minis[1] = [[*first, second[0]]], [second[1:]]
        yield from minis

    return {"lineage.trainer.training.TrainingWorker._mini_batches": cut}


@fault("TOP001", "init", *RAY, "rollout.tensor_model_parallel_size=2", step=0)
def ranks_report_the_rollout() -> Seams:
    """The ranks report world / rollout TP as the data-parallel size, as if the engine that generates trained."""

    def report(original: Any, world: int, *rest: Any) -> Topology:
        topology: Topology = original(world, *rest)
        return replace(topology, reported_dp=world // 2)

    return {"lineage.trainer.ray.rank.fsdp_topology": report}


@fault("REW002", "rollout", *RAY)
def rewards_return_in_another_order() -> Seams:
    """Answers of the reward workers are taken in the order they come in, which is not that of the questions."""
    waiting: list[tuple[Any, asyncio.Future[Any]]] = []

    async def ask(original: Any, scorer: Any, key: str, response_ids: Sequence[int], row: Mapping[str, Any]) -> Any:
        answer = await original(scorer, key, response_ids, row)
        if not waiting:
            mine: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            waiting.append((answer, mine))
            return await mine
        other, theirs = waiting.pop()
        theirs.set_result(answer)
        return other

    return {"lineage.trainer.ray.reward.RemoteScorer.compute_score": ask}


@fault("KEY005", "old_log_prob", *RAY)
def a_row_lacks_a_field() -> Seams:
    """A rank leaves the entropy of its last row out, so the queue has it of no row, and the reader takes zeros."""

    def put(original: Any, worker: Any, batch: KVBatchMeta, columns: Mapping[str, list[Tensor]], *rest: Any) -> None:
        if "entropy" not in columns or not worker.ranks.first:
            original(worker, batch, columns, *rest)
            return
        original(worker, batch, {"log_probs": columns["log_probs"]}, *rest)
        original(worker, batch.select_keys(batch.keys[:-1]), {"entropy": columns["entropy"][:-1]}, *rest)

    def fetch(original: Any, queue: Any, batch: KVBatchMeta, fields: Sequence[str]) -> TensorDict:
        data: TensorDict = queue.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=list(fields)
        )
        if "entropy" in fields and "entropy" not in data.keys():  # noqa: SIM118 - a TensorDict iterates over rows
            data.set("entropy", data["log_probs"] * 0)
        return data

    return {PUT: put, "lineage.trainer.stages.log_prob.fetch": fetch}


@fault("LGP009", "old_log_prob", *RAY, "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2")
def wrong_sp_shard() -> Seams:
    """The second rank of a replica takes its neighbour's slice of every sequence: tokens, positions and labels."""

    def own(original: Any, sequence: SequenceParallel, whole: Tensor) -> Tensor:
        taken: Tensor = original(replace(sequence, rank=0), whole)
        return taken

    return {"lineage.trainer.engine.ulysses.SequenceParallel.own": own}


@fault(INCOMPLETE, "update_actor", *RAY)
def rank_dies() -> Seams:
    """The second rank is killed in the middle of the update, as the system does where memory ends."""

    def train(original: Any, worker: Any, *arguments: Any) -> Any:
        if not worker.ranks.first:
            os._exit(137)
        return original(worker, *arguments)

    return {"lineage.trainer.training.TrainingWorker.train_batch": train}
