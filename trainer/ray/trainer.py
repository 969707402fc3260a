"""The trainer over processes: the same step, its parts elsewhere."""

from __future__ import annotations

import contextlib
from typing import Any

from lineage import hooks
from lineage.hooks import traced
from lineage.trainer.agent_loop import AgentLoopManager
from lineage.trainer.grpo import PPOTrainerSync, Tracking
from lineage.trainer.parts import Parts
from lineage.trainer.queue.transfer_queue import TransferQueue
from lineage.trainer.ray.recording import RunTrace
from lineage.trainer.ray.run_processes import RunProcesses
from lineage.trainer.ray.setup import build_agent_loop_manager, build_parts


class RayPPOTrainer(PPOTrainerSync):
    """``PPOTrainerSync`` whose workers, rollout, rewards and queue are processes.

    Args:
        config: resolved configuration, validated.
        trace: how every process records.
        tracking: takes the metrics of each step.
    """

    def __init__(self, config: Any, trace: RunTrace, *, tracking: Tracking | None = None) -> None:
        super().__init__(config, folder=trace.folder, tracking=tracking, queue=TransferQueue())
        self.processes = RunProcesses(trace)
        trace.open("driver")

    def _build_parts(self) -> Parts:
        return build_parts(self.config, self._queue, self.processes)

    @traced("init", component="TaskRunner.init_agent_loop_manager", consumer="PPOTrainer.fit")
    def init_agent_loop_manager(self) -> AgentLoopManager:
        """The manager that runs the sessions, over worker processes."""
        return build_agent_loop_manager(self.config, self.parts, self.processes)

    def _begin(self, global_steps: int) -> None:
        super()._begin(global_steps)
        self.processes.begin(global_steps)

    def _seal(self) -> None:
        self.processes.seal()
        super()._seal()

    def close(self, why: BaseException | None) -> None:
        """End every process's recording, this one's last: it seals the run. Then the queue goes.

        Args:
            why: what ended the run; None where it ended in order.
        """
        try:
            self.processes.close(why)
        finally:
            hooks.recorder().close(why)
            hooks.install(hooks.NullRecorder())
            with contextlib.suppress(Exception):  # a cluster that is already going down has ended it
                self._queue.close()
