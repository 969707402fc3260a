"""Which prompt groups are done, and the batch made of them (verl ``ReplayBuffer``, sync mode).

The buffer holds no values: it reads the queue's tags, sorts prompts into four status sets, and hands out keys. In sync
mode there is no backlog to replay: the trainer waits until the groups it has just submitted are terminal. A group that
teaches nothing (``algorithm.filter_groups``) or that failed without an output (``trainer.v1.sampler``) can be evicted
and replaced by fresh prompts for the same policy version.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from lineage import hooks
from lineage.hooks import parse_key, traced
from lineage.trainer.prompt_groups import (
    FAILED,
    FILTERED,
    GroupFilter,
    Output,
    RefillPolicy,
    ReplayBufferError,
    StatusSets,
)
from lineage.trainer.protocol import KVBatchMeta

__all__ = ["VALIDATION", "Refill", "RefillPolicy", "ReplayBuffer", "ReplayBufferError", "StatusSets"]

VALIDATION = "val"
"""The partition where every terminal group is sampleable: nothing is evicted, and a batch may be empty."""

# submits so many fresh prompts to the rollout (the trainer's ``_add_prompts_to_generate``)
Refill = Callable[[int], Awaitable[object] | object]

logger = logging.getLogger(__name__)

_PATIENCE = 10  # batches of prompts generated for one step, after each of which a line says how it stands
_SURPLUS = "surplus"
_METRICS = {
    FILTERED: "training/filter_groups/evicted_samples",
    _SURPLUS: "training/filter_groups/discarded_surplus_samples",
    FAILED: "training/rollout_failure/evicted_samples",
}


class ReplayBuffer:
    """Samples terminal groups from the queue.

    Args:
        queue: TransferQueue's interface.
        poll_interval: seconds between two looks at the queue.
        policy: what is evicted and replaced; None evicts nothing.
        refill: submits fresh prompts, for a policy that evicts. Called outside every stage of the trace.

    Attributes:
        metrics: prompt groups evicted and discarded by the last :meth:`sample`, by verl's names.
    """

    def __init__(
        self,
        queue: Any,
        poll_interval: float = 0.001,
        *,
        policy: RefillPolicy | None = None,
        refill: Refill | None = None,
    ) -> None:
        self.queue = queue
        self.poll_interval = poll_interval
        self.policy = policy or RefillPolicy()
        self.refill = refill
        self.sets = StatusSets()
        self.metrics: dict[str, float] = {}
        metric = self.policy.filter_groups_metric
        self._filter = None if metric is None else GroupFilter(queue, metric)
        self._outputs: dict[str, list[Output]] = {}

    async def sample(
        self, global_steps: int, partition_id: str, batch_size: int, *, still_running: Callable[[], bool] = lambda: True
    ) -> KVBatchMeta:
        """Wait for ``batch_size`` terminal groups, oldest step first, and return their trajectories.

        The prompt keys of the groups are cleared: their part is played. A group that failed gives the outputs it has.
        A policy that evicts does so when every prompt in flight has ended, and submits the fresh prompts then; groups
        that are too many in the end are discarded. verl refills as slots become free: what is drawn from the dataset
        then depends on which session ends first, and no two runs of one seed would be the same.

        Args:
            global_steps: the step that samples, recorded with the batch.
            still_running: false when no rollout is at work any more.

        Raises:
            ReplayBufferError: all selected groups failed without an output, the rollouts ended too early, or the
                batches of prompts allowed for one step are used up.
        """
        policy = self.policy if partition_id != VALIDATION else RefillPolicy()
        counts: Counter[str] = Counter()
        credit = submitted = 0
        while True:
            await self._wait(global_steps, partition_id, None if policy.evicts else batch_size, still_running)
            if not policy.evicts:
                break
            submitted = submitted or len(self._outputs)
            evicted = await self._evict(policy, partition_id)
            counts.update(evicted.values())
            if len(self._outputs) >= batch_size:
                break
            credit += sum(policy.credit(reason) for reason in evicted.values())
            fresh = policy.may_submit(credit, batch_size, submitted)
            if not fresh:
                limit = policy.max_num_gen_batches
                raise ReplayBufferError(
                    f"step {global_steps}: of {submitted} prompt groups {counts[FILTERED]} were filtered and "
                    f"{counts[FAILED]} failed, which leaves {len(self._outputs)} of {batch_size}"
                    + (f": raise algorithm.filter_groups.max_num_gen_batches={limit}, 0 sets no limit" if limit else "")
                )
            await self._submit(fresh)
            if (submitted + fresh) // (_PATIENCE * batch_size) > submitted // (_PATIENCE * batch_size):
                logger.warning(
                    "step %d: %d prompt groups generated so far: %d filtered, %d failed, %d of %d kept",
                    global_steps, submitted + fresh, counts[FILTERED], counts[FAILED], len(self._outputs), batch_size,
                )  # fmt: skip
            credit, submitted = credit - fresh, submitted + fresh
        groups = self.sampleable()
        if policy.evicts and len(groups) > batch_size:
            counts[_SURPLUS] = len(groups) - batch_size
            with _stage():
                await self._clear_groups(dict.fromkeys(groups[batch_size:], FILTERED), _SURPLUS, partition_id)
        self.metrics = {_METRICS[reason]: float(count) for reason, count in counts.items()}
        with _stage():
            return await self._materialize_batch(groups[:batch_size], global_steps, partition_id)

    def sampleable(self) -> list[str]:
        """Uids of terminal groups by the step that submitted them, then in the order of submission."""
        order = {uid: place for place, uid in enumerate(self._outputs)}
        terminal = self.sets.terminal
        return sorted(terminal, key=lambda uid: (terminal[uid].get("global_steps", 0), order[uid]))

    async def _wait(
        self, global_steps: int, partition_id: str, count: int | None, still_running: Callable[[], bool]
    ) -> None:
        """Poll until ``count`` groups have ended; None waits until no prompt is in flight."""
        while True:
            alive = still_running()  # asked before the look: what ends in between is seen by the look
            await self._sync_metadata_from_transfer_queue(partition_id)
            pending, running, ended = len(self.sets.pending), len(self.sets.running), len(self.sets.terminal)
            if not pending + running if count is None else ended >= count:
                return
            if not alive:
                raise ReplayBufferError(
                    f"step {global_steps}: {ended} of {ended + pending + running if count is None else count} prompt "
                    f"groups ended, no rollout is running: {pending} pending, {running} running"
                )
            await asyncio.sleep(self.poll_interval)

    async def _sync_metadata_from_transfer_queue(self, partition_id: str) -> None:
        listed = (await self.queue.async_kv_list(partition_id)).get(partition_id, {})
        self.sets = StatusSets()
        self._outputs = {}
        for key, tag in listed.items():
            if tag.get("is_prompt"):
                self.sets.add(key, tag)
                self._outputs[key] = []
        for key, tag in listed.items():
            if tag.get("is_prompt"):
                continue
            parsed = parse_key(key)
            if parsed is None:
                raise ReplayBufferError(f"queue key {key!r} is no trajectory key {{uid}}_{{session_id}}_{{index}}")
            if parsed.uid in self._outputs:
                self._outputs[parsed.uid].append(Output(parsed.session_id, parsed.index, key, tag))

    # ---------------------------------------------------------------------------------------------------- eviction

    async def _evict(self, policy: RefillPolicy, partition_id: str) -> dict[str, str]:
        """Clear the groups the policy does not keep; returns the reason of each."""
        with _stage():
            failed = [uid for uid in self.sets.failure if policy.refill_failed_groups and not self._outputs[uid]]
            gone = dict.fromkeys(failed, FAILED)
            if gone:
                await self._clear_groups(gone, "no output", partition_id)
            if self._filter:
                flat = await self._filter.flat({uid: self._outputs[uid] for uid in self.sets.finished}, partition_id)
                if flat:
                    await self._clear_groups(dict.fromkeys(flat, FILTERED), f"one {self._filter.metric}", partition_id)
                gone.update(dict.fromkeys(flat, FILTERED))
        return gone

    async def _clear_groups(self, reasons: dict[str, str], why: str, partition_id: str) -> None:
        """Declare groups as left out, with every output they have, and remove all of it from the queue."""
        uids, stage = list(reasons), hooks.current()
        self._record(uids, list(reasons.values()), attrs={"left_out": why})
        outputs = [(output.key, reasons[uid]) for uid in uids for output in sorted(self._outputs[uid])]
        if outputs:
            stage.filter([key for key, _ in outputs], columns={"reason": [reason for _, reason in outputs]})
        await self.queue.async_kv_clear([*uids, *(key for key, _ in outputs)], partition_id)
        for uid in uids:
            self.sets.remove(uid)
            del self._outputs[uid]

    async def _submit(self, prompts: int) -> None:
        if self.refill is None:
            raise ReplayBufferError("groups were evicted and the replay buffer has no refill to replace them")
        started = self.refill(prompts)
        if inspect.isawaitable(started):
            await started

    # ---------------------------------------------------------------------------------------------------- the batch

    async def _materialize_batch(self, uids: list[str], global_steps: int, partition_id: str) -> KVBatchMeta:
        """Keys and tags of the groups' outputs, by group, session and index; clears the prompt keys."""
        outputs = [output for uid in uids for output in sorted(self._outputs[uid])]
        terminal = self.sets.terminal
        self._record(uids, [terminal[uid].get("reason") for uid in uids])
        if not outputs and partition_id != VALIDATION:
            errors = (terminal[uid]["error"] for uid in uids if terminal[uid].get("error"))
            raise ReplayBufferError(
                f"step {global_steps}: all {len(uids)} prompt groups failed without any output; first error: "
                f"{next(errors, 'no reason was recorded')}"
            )
        await self.queue.async_kv_clear(uids, partition_id)
        batch = KVBatchMeta(
            keys=[output.key for output in outputs],
            tags=[output.tag for output in outputs],
            partition_id=partition_id,
            extra_info={"global_steps": global_steps},
        )
        hooks.current().keys("produce", batch.keys)
        return batch

    def _record(self, uids: Sequence[str], reasons: Sequence[str | None], **context: Any) -> None:
        """The row that says what became of groups: chosen, or left out for a reason."""
        tags = [self.sets.terminal[uid] for uid in uids]
        columns = {
            "status": [tag["status"] for tag in tags],
            "reason": list(reasons),
            "expected": [tag.get("expected") for tag in tags],
        }
        hooks.current().filter(uids, entity="prompt", field="status", columns=columns, **context)


def _stage() -> traced:
    return traced("sample", component="ReplayBuffer.sample", consumer="PPOTrainer._step_once")
