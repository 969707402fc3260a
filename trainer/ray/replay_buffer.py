"""The replay buffer of the driver, whose recorder did not see the agent loops put what it samples."""

from __future__ import annotations

from collections.abc import Iterable

from lineage.trainer.protocol import KVBatchMeta
from lineage.trainer.ray.recording import note_tags
from lineage.trainer.replay_buffer import RefillPolicy, ReplayBuffer


class DriverReplayBuffer(ReplayBuffer):
    """Tells the recorder the tags of outputs once they are chosen or left out: rows about them carry them.

    Of a training or a validation alike; the recorder forgets them when the keys are cleared.
    """

    async def _evict(self, policy: RefillPolicy, partition_id: str) -> dict[str, str]:
        self._note(self.sets.finished)
        return await super()._evict(policy, partition_id)

    async def _clear_groups(self, reasons: dict[str, str], why: str, partition_id: str) -> None:
        self._note(reasons)
        await super()._clear_groups(reasons, why, partition_id)

    async def _materialize_batch(self, uids: list[str], global_steps: int, partition_id: str) -> KVBatchMeta:
        self._note(uids)
        return await super()._materialize_batch(uids, global_steps, partition_id)

    def _note(self, uids: Iterable[str]) -> None:
        outputs = [output for uid in uids for output in self._outputs[uid]]
        note_tags([output.key for output in outputs], [output.tag for output in outputs])
