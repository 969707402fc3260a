"""Faults of the queue's life."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Sequence
from typing import Any

from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from lineage import hooks
from lineage.hooks import traced
from lineage.trainer.faults.registry import Seams, fault, trace_fault
from lineage.trainer.faults.rows import TraceRows
from lineage.trainer.faults.seams import TRAINER
from lineage.trainer.parts import Parts
from lineage.trainer.protocol import KVBatchMeta, nested_from_list
from lineage.trainer.stages.fields import put
from lineage.trainer.training import rows_of

FETCH = "lineage.trainer.actor.fetch"
PUT = "lineage.trainer.actor.ActorRolloutRefWorker._put"
TAG = "lineage.trainer.agent_loop.worker.AgentLoopWorker._tag"
GET = "lineage.trainer.queue.local.LocalTransferQueue.kv_batch_get"
REGISTER = "lineage.trainer.grpo.register_prompts"


@fault("QUE001", "rollout", reports=["rllm-late-episodes-after-completion"])
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


@fault("QUE001", "dump")
def cleared_key_is_tagged() -> Seams:
    """A logger that runs behind the step notes on its rows that it has written them, when they are cleared already."""

    def clear(original: Any, trainer: Any, batch: KVBatchMeta) -> None:
        original(trainer, batch)
        with traced("dump", component="PPOTrainer._log_rollout_data"):
            trainer.parts.queue.kv_put(key=batch.keys[0], partition_id=batch.partition_id, tag={"dumped": True})

    return {f"{TRAINER}._clear": clear}


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


@fault("QUE002", "clear", reports=["tq-tag-only-keys-not-clearable"])
def prompt_keys_are_never_cleared() -> Seams:
    """A clear asks for the fields of a key; prompt keys have none, only tags, and are passed over."""

    async def clear(original: Any, queue: Any, keys: list[str], partition_id: str, **options: Any) -> None:
        if hooks.current().name != "sample":
            await original(queue, keys, partition_id, **options)

    return {"lineage.attach.transfer_queue.TracedQueue.async_kv_clear": clear}


@fault("QUE002", "clear", reports=["areal-fetch-buffer-leak"])
def consumer_keeps_what_it_fetched() -> Seams:
    """The worker keeps the rows it fetched in a buffer of its own, which the cleaner of the queue knows nothing of."""

    def fetch(original: Any, queue: Any, batch: KVBatchMeta, fields: Sequence[str]) -> TensorDict:
        data: TensorDict = original(queue, batch, fields)
        queue.kv_batch_put(keys=batch.keys, partition_id="fetched", fields=data)
        return data

    return {FETCH: fetch}


@fault("QUE002", "clear", reports=["areal-non-head-rank-storage"])
def every_rank_keeps_its_results() -> Seams:
    """All ranks of a group store what they computed; the cleaner knows the keys of the first one."""

    def keep(original: Any, worker: Any, batch: KVBatchMeta, columns: dict[str, list[Tensor]], *rest: Any) -> None:
        original(worker, batch, columns, *rest)
        values = {name: nested_from_list(rows) for name, rows in columns.items()}
        fields = TensorDict(values, batch_size=[len(batch)])
        worker.queue.kv_batch_put(keys=batch.keys, partition_id="rank_1", fields=fields)

    return {PUT: keep}


@fault("QUE002", "clear")
def prompt_nobody_runs() -> Seams:
    """One prompt more is submitted than the step waits for; its key stays when the others are gone."""

    def register(original: Any, parts: Parts, batch: Any) -> None:
        original(parts, batch)
        tag = {"is_prompt": True, "status": "pending", "global_steps": 2, "expected": 2}
        with traced("prompt", component="PPOTrainer._submit_batch_to_rollout", consumer="AgentLoopWorker.run"):
            parts.queue.kv_put(key="5e1f0b7c-0000-4000-8000-000000000000", partition_id="train", tag=tag)

    return {REGISTER: register}


@fault("QUE003", "ref_log_prob", reports=["tq-shared-default-status-tensor"])
def freed_slots_still_answer() -> Seams:
    """Slots share one array of what is ready: padding rows, in slots just freed, answer with another row's values."""

    def get(original: Any, queue: Any, keys: list[str], partition_id: str, *rest: Any) -> TensorDict:
        if hooks.current().name == "ref_log_prob":
            real = next(key for key in keys if not key.startswith("pad"))
            keys = [real if key.startswith("pad") else key for key in keys]
        return original(queue, keys, partition_id, *rest)

    return {GET: get}


@fault("QUE003", "balance")
def one_object_stands_for_two_rows() -> Seams:
    """Objects are kept by their place in a list that is shared: a read gives the prompt of another row."""

    def get(original: Any, queue: Any, keys: list[str], partition_id: str, *rest: Any) -> TensorDict:
        data: TensorDict = original(queue, keys, partition_id, *rest)
        if hooks.current().name == "balance":
            others = [key for key in queue._partitions[partition_id] if key not in keys]
            data["raw_prompt"] = original(queue, others[-len(keys) :], partition_id, ["raw_prompt"])["raw_prompt"]
        return data

    return {GET: get}


@fault("QUE004", "metrics", reports=["tq-concurrent-clear-miss", "forge-fields-deleted-in-loop"])
def cleared_while_it_is_read() -> Seams:
    """A cleaner removes rows after they are named and before they are read; the reader takes what is left."""

    def compute(original: Any, parts: Parts, batch: KVBatchMeta, *rest: Any) -> Any:
        gone = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if tag["is_padding"]]
        with traced("clear", component="PPOTrainer.fit"):
            parts.queue.kv_clear(keys=gone, partition_id=batch.partition_id)
        with traced("metrics", component="PPOTrainer._compute_metrics"):
            parts.queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["num_turns"])
        return original(parts, batch.select_keys([key for key in batch.keys if key not in gone]), *rest)

    return {"lineage.trainer.grpo.compute_metrics": compute}


@fault("QUE004", "update_actor")
def weights_nobody_computed() -> Seams:
    """The update asks for importance weights that are switched off elsewhere, gets none, and trains without."""

    def fields(original: Any, *args: Any) -> list[str]:
        return [*original(*args), "rollout_is_weights"]

    def fetch(original: Any, queue: Any, batch: KVBatchMeta, fields: Sequence[str]) -> Any:
        return queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(fields))

    return {"lineage.trainer.actor.update_fields": fields, FETCH: fetch}


@fault("QUE005", "rollout")
def group_ends_without_having_run() -> Seams:
    """The status of a group is only written when it ends: whoever evicts what never started may take it meanwhile."""

    async def tag(original: Any, worker: Any, prompt: Any, **tag: Any) -> None:
        if tag["status"] != "running":
            await original(worker, prompt, **tag)

    return {TAG: tag}


@fault("QUE005", "rollout")
def ended_group_runs_again() -> Seams:
    """A worker that answers late says that a group runs which has ended, and then that it has ended once more."""

    async def tag(original: Any, worker: Any, prompt: Any, **tag: Any) -> None:
        await original(worker, prompt, **tag)
        if tag["status"] == "finished":
            await original(worker, prompt, status="running")
            await original(worker, prompt, status="finished")

    return {TAG: tag}


@fault("QUE005", "prompt")
def prompts_lie_in_the_queue() -> Seams:
    """The rows of the dataset are put under the prompt keys, where synchronous training keeps tags alone."""

    def register(original: Any, parts: Parts, batch: Any) -> None:
        original(parts, batch)
        uids = [str(uid) for uid in batch.non_tensor_batch["uid"]]
        rows = NonTensorStack(*batch.non_tensor_batch["raw_prompt"])
        with traced("prompt", component="PPOTrainer._submit_batch_to_rollout", consumer="AgentLoopWorker.run"):
            fields = TensorDict({"raw_prompt": rows}, batch_size=[len(uids)])
            parts.queue.kv_batch_put(keys=uids, partition_id=batch.meta_info["partition_id"], fields=fields)

    return {REGISTER: register}


@fault("QUE006", "advantage", "algorithm.rollout_correction.rollout_is=token")
def importance_weights_are_not_read() -> Seams:
    """Importance weights are computed and stored, and the update reads the fields it always read."""

    def fields(original: Any, *args: Any) -> list[str]:
        return [name for name in original(*args) if name != "rollout_is_weights"]

    return {"lineage.trainer.actor.update_fields": fields}


@fault("QUE007", "rollout", "+experiment=failures")
def errors_are_gathered_and_forgotten() -> Seams:
    """Exceptions of sessions are gathered with their results and not looked at: the group counts as finished."""

    async def tag(original: Any, worker: Any, prompt: Any, **tag: Any) -> None:
        status = "finished" if tag["status"] == "failure" else tag["status"]
        await original(worker, prompt, status=status)

    return {TAG: tag}


@fault("QUE007", "sample", "+experiment=failures")
def failed_group_is_handed_on_as_whole() -> Seams:
    """The buffer files both ends of a group under one name: training is told that a failed group finished."""

    def record(original: Any, buffer: Any, uids: Sequence[str], reasons: Sequence[str | None], **context: Any) -> None:
        for tag in buffer.sets.failure.values():
            tag["status"] = "finished"
        original(buffer, uids, [None] * len(uids), **context)

    return {"lineage.trainer.replay_buffer.ReplayBuffer._record": record}


# A synchronous step waits for every group it submitted: in it a prompt cannot wait for ever. So an asynchronous run
# is made of its rows.


@trace_fault("QUE008", "prompt", "trainer.total_training_steps=4", step=1)
def worker_died_with_its_prompt(rows: TraceRows) -> None:
    """The worker that was given a prompt died: its key says pending, and nobody looks at it again."""
    rows.configure("trainer.v1.trainer_mode", "separate_async")
    rows.configure("trainer.v1.sampler.max_off_policy_threshold", 2)
    tag = rows.one(global_steps=1, stage="prompt", op="tag")
    for name, values in tag.items():
        if isinstance(values, list) and len(values) == tag["n"]:
            tag[name] = [*values, "5e1f0b7c-0000-4000-8000-000000000000" if name == "key" else values[-1]]
    tag["n"] += 1


@fault("QUE009", "old_log_prob", reports=["verl-graph-kept-in-outputs"])
def graph_is_kept() -> Seams:
    """The log-probs are stored as they came from the forward pass, with the graph of the whole batch behind them."""

    def keep(
        original: Any, worker: Any, batch: KVBatchMeta, columns: dict[str, list[Tensor]], *rest: Any, **options: Any
    ) -> None:
        attached = {name: [row.clone().requires_grad_() for row in rows] for name, rows in columns.items()}
        original(worker, batch, attached, *rest, **options)

    return {PUT: keep}


@fault("QUE009", "advantage")
def stage_puts_back_all_it_held() -> Seams:
    """The advantage stage puts back the objects it held beside its results, emptied for the way."""

    def compute(original: Any, parts: Parts, batch: KVBatchMeta) -> Any:
        metrics = original(parts, batch)
        with traced(
            "advantage", component="PPOTrainer._compute_advantage", consumer="ActorRolloutRefWorker.update_actor"
        ):
            put(parts, batch, {"reward_model": NonTensorStack(*[{} for _ in batch.keys])})
        return metrics

    return {"lineage.trainer.grpo.compute_advantages": compute}


@fault("QUE009", "ref_log_prob")
def reference_shifts_positions_in_place() -> Seams:
    """The reference packs its rows, counts their positions on in place, and puts them back with its log-probs."""

    def keep(original: Any, worker: Any, batch: KVBatchMeta, *rest: Any, **options: Any) -> None:
        original(worker, batch, *rest, **options)
        if hooks.current().name == "ref_log_prob":
            held = worker.queue.kv_batch_get(
                keys=batch.keys, partition_id=batch.partition_id, select_fields=["position_ids"]
            )
            moved = nested_from_list([row + 1 for row in rows_of(held["position_ids"])])
            fields = TensorDict({"position_ids": moved}, batch_size=[len(batch)])
            worker.queue.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

    return {PUT: keep}
