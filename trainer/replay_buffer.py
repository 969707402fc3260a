"""Which prompt groups are done, and the batch made of them (verl ``ReplayBuffer``, sync mode).

The buffer holds no values: it reads the queue's tags, sorts prompts into four status sets, and hands out keys. In sync
mode there is no backlog to replay: the trainer waits until the groups it has just submitted are terminal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lineage import hooks
from lineage.hooks import UserError, parse_key, traced
from lineage.trainer.protocol import KVBatchMeta


class ReplayBufferError(UserError):
    """No batch can be made: every session of the batch failed, or nothing is left that could finish a group."""


@dataclass
class StatusSets:
    """Prompt uids by status, each with its tag, in the order they were submitted."""

    pending: dict[str, dict[str, Any]] = field(default_factory=dict)
    running: dict[str, dict[str, Any]] = field(default_factory=dict)
    finished: dict[str, dict[str, Any]] = field(default_factory=dict)
    failure: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, uid: str, tag: dict[str, Any]) -> None:
        """File a prompt under the status its tag gives."""
        sets = {"pending": self.pending, "running": self.running, "finished": self.finished, "failure": self.failure}
        status = tag.get("status")
        if status not in sets:
            raise ReplayBufferError(f"prompt {uid} has status {status!r}: known are {', '.join(sets)}")
        sets[status][uid] = tag


class ReplayBuffer:
    """Samples terminal groups from the queue.

    Args:
        queue: TransferQueue's interface.
        poll_interval: seconds between two looks at the queue.
    """

    def __init__(self, queue: Any, poll_interval: float = 0.001) -> None:
        self.queue = queue
        self.poll_interval = poll_interval
        self.sets = StatusSets()
        self._trajectories: dict[str, list[tuple[int, int, str, dict[str, Any]]]] = {}

    @traced("sample", component="ReplayBuffer.sample", consumer="PPOTrainer._step_once")
    async def sample(
        self, global_steps: int, partition_id: str, batch_size: int, *, still_running: Callable[[], bool] = lambda: True
    ) -> KVBatchMeta:
        """Wait for ``batch_size`` terminal groups, oldest step first, and return their trajectories.

        The prompt keys of the groups are cleared: their part is played. A group that failed gives the outputs it has.

        Args:
            global_steps: the step that samples, recorded with the batch.
            still_running: false when no rollout is at work any more.

        Raises:
            ReplayBufferError: all selected groups failed without an output, or the rollouts ended too early.
        """
        while True:
            alive = still_running()  # asked before the look: what ends in between is seen by the look
            await self._sync_metadata_from_transfer_queue(partition_id)
            groups = self.sampleable()
            if len(groups) >= batch_size:
                break
            if not alive:
                raise ReplayBufferError(
                    f"step {global_steps}: {len(groups)} of {batch_size} prompt groups ended, no rollout is running: "
                    f"{len(self.sets.pending)} pending, {len(self.sets.running)} running"
                )
            await asyncio.sleep(self.poll_interval)
        return await self._materialize_batch(groups[:batch_size], global_steps, partition_id)

    def sampleable(self) -> list[str]:
        """Uids of terminal groups by the step that submitted them, then in the order of submission."""
        order = {uid: place for place, uid in enumerate(self._trajectories)}
        terminal = {**self.sets.finished, **self.sets.failure}
        return sorted(terminal, key=lambda uid: (terminal[uid].get("global_steps", 0), order[uid]))

    async def _sync_metadata_from_transfer_queue(self, partition_id: str) -> None:
        listed = (await self.queue.async_kv_list(partition_id)).get(partition_id, {})
        self.sets = StatusSets()
        self._trajectories = {}
        for key, tag in listed.items():
            if tag.get("is_prompt"):
                self.sets.add(key, tag)
                self._trajectories[key] = []
        for key, tag in listed.items():
            if tag.get("is_prompt"):
                continue
            parsed = parse_key(key)
            if parsed is None:
                raise ReplayBufferError(f"queue key {key!r} is no trajectory key {{uid}}_{{session_id}}_{{index}}")
            if parsed.uid in self._trajectories:
                self._trajectories[parsed.uid].append((parsed.session_id, parsed.index, key, tag))

    async def _materialize_batch(self, uids: list[str], global_steps: int, partition_id: str) -> KVBatchMeta:
        """Keys and tags of the groups' outputs, by group, session and index; clears the prompt keys."""
        prompts = [self.sets.finished.get(uid) or self.sets.failure[uid] for uid in uids]
        outputs = [output for uid in uids for output in sorted(self._trajectories[uid], key=lambda item: item[:2])]
        stage = hooks.current()
        stage.filter(
            uids,
            entity="prompt",
            field="status",
            columns={
                "status": [tag["status"] for tag in prompts],
                "reason": [tag.get("reason") for tag in prompts],
                "expected": [tag.get("expected") for tag in prompts],
            },
        )
        if not outputs:
            first = next((tag["error"] for tag in prompts if tag.get("error")), "no reason was recorded")
            raise ReplayBufferError(
                f"step {global_steps}: all {len(uids)} prompt groups failed without any output; first error: {first}"
            )
        await self.queue.async_kv_clear(uids, partition_id)
        batch = KVBatchMeta(
            keys=[key for _, _, key, _ in outputs],
            tags=[tag for _, _, _, tag in outputs],
            partition_id=partition_id,
            extra_info={"global_steps": global_steps},
        )
        stage.keys("produce", batch.keys)
        return batch
