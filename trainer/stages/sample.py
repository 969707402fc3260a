"""The sample stage: wait until the groups of a batch have ended, and nobody writes any more."""

from __future__ import annotations

from lineage.trainer.agent_loop import AgentLoopManager
from lineage.trainer.parts import Parts
from lineage.trainer.protocol import KVBatchMeta
from lineage.trainer.replay_buffer import ReplayBufferError


async def sample_groups(
    parts: Parts, manager: AgentLoopManager, global_steps: int, partition_id: str, groups: int
) -> KVBatchMeta:
    """Keys and tags of the outputs of ``groups`` prompt groups; every worker has ended by then."""
    try:
        batch = await parts.replay_buffer.sample(
            global_steps, partition_id, groups, still_running=lambda: manager.running
        )
    except ReplayBufferError:
        await manager.join()  # a worker's own error says more than the batch it spoilt
        raise
    await manager.join()
    return batch
