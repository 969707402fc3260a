"""The trainer over processes: the same step, its parts elsewhere."""

from __future__ import annotations

from typing import Any

from lineage import hooks
from lineage.hooks import traced
from lineage.trainer.agent_loop import AgentLoopManager
from lineage.trainer.grpo import PPOTrainerSync, Tracking
from lineage.trainer.parts import Parts
from lineage.trainer.protocol import KVBatchMeta
from lineage.trainer.ray.recording import RunTrace, note_tags
from lineage.trainer.ray.setup import Cluster


class RayPPOTrainer(PPOTrainerSync):
    """``PPOTrainerSync`` whose workers, rollout, rewards and queue are processes.

    Args:
        config: resolved configuration, validated.
        trace: how every process records.
        tracking: takes the metrics of each step.
    """

    def __init__(self, config: Any, trace: RunTrace, *, tracking: Tracking | None = None) -> None:
        super().__init__(config, folder=trace.folder, tracking=tracking)
        self.cluster = Cluster(config, trace)
        trace.open("driver")

    def _build_parts(self) -> Parts:
        return self.cluster.build_parts()

    @traced("init", component="TaskRunner.init_agent_loop_manager", consumer="PPOTrainer.fit")
    def init_agent_loop_manager(self) -> AgentLoopManager:
        """The manager that runs the sessions, over worker processes."""
        return self.cluster.build_agent_loop_manager(self.parts)

    def _begin(self, global_steps: int) -> None:
        super()._begin(global_steps)
        self.cluster.begin(global_steps)

    def _seal(self) -> None:
        self.cluster.seal()
        super()._seal()

    async def _sample(self) -> KVBatchMeta:
        batch = await super()._sample()
        note_tags(batch.keys, batch.tags)  # the agent loops put them
        return batch

    def close(self, why: BaseException | None) -> None:
        """End every process's recording, this one's last: it seals the run. Then the queue goes.

        Args:
            why: what ended the run; None where it ended in order.
        """
        try:
            self.cluster.close_recorders(why)
        finally:
            hooks.recorder().close(why)
            hooks.install(hooks.NullRecorder())
            self.cluster.close_queue()
