"""Agent-loop workers in processes of their own, and a worker as the manager sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lineage import hooks
from lineage.hooks import Scope
from lineage.trainer.agent_loop import AgentLoopWorker
from lineage.trainer.protocol import DataProto
from lineage.trainer.queue.transfer_queue import TransferQueue
from lineage.trainer.ray.errors import await_result
from lineage.trainer.ray.log_relay import LogLine
from lineage.trainer.ray.recording import RunProcess, RunTrace
from lineage.trainer.ray.reward import RemoteScorer
from lineage.trainer.ray.rollout import RemoteRollout
from lineage.trainer.setup import loop_context, register_loops, source_and_tokenizer


class AgentLoopProcess(RunProcess):
    """Runs the sessions of a share of the prompts (verl's ``AgentLoopWorkerTQ`` actor).

    Args:
        trace: how the process records.
        number: of the worker.
        config: the configuration.
        rollout: the engine.
        vocab_size: token ids of the model lie below it.
        scorers: handles of the reward workers; none where a colocated reward scores later.
    """

    def __init__(
        self,
        trace: RunTrace,
        number: int,
        config: Any,
        rollout: RemoteRollout,
        vocab_size: int,
        scorers: Sequence[Any],
    ) -> None:
        super().__init__(trace, f"agent_loop:{number}")
        agent = config.actor_rollout_ref.rollout.agent
        _, tokenizer = source_and_tokenizer(config)
        register_loops(config)
        self.worker = AgentLoopWorker(
            hooks.trace_queue(TransferQueue()),
            loop_context(config, rollout, tokenizer, vocab_size),
            RemoteScorer(scorers) if scorers else None,
            default_agent_loop=agent.default_agent_loop,
            seed=config.trainer.seed,
        )

    def seal(self) -> list[LogLine]:
        """The step has ended: the driver has cleared what the sessions put."""
        self._known.update(self.worker.queue.forget_all())
        return super().seal()

    async def run(self, scope: Scope | None, batch: DataProto) -> None:
        """All sessions of a batch of prompts (see ``AgentLoopWorker.run``)."""
        uids = [str(uid) for uid in batch.non_tensor_batch["uid"]]
        tag = {"is_prompt": True, "global_steps": batch.meta_info["global_steps"]}
        self.know(uids, [tag] * len(uids))
        with hooks.inside(scope):
            await self.worker.run(batch)


class RemoteAgentLoopWorker:
    """One worker, as the manager gives it prompts.

    Args:
        number: of the worker.
        process: handle of its :class:`AgentLoopProcess`.
        queue: the driver's side of the queue, for a manager of the user's own.
    """

    def __init__(self, number: int, process: Any, queue: Any) -> None:
        self.number = number
        self.process = process
        self.queue = queue

    async def run(self, batch: DataProto) -> None:
        """See ``AgentLoopWorker.run``; cancelled here, it is cancelled there."""
        await await_result(
            self.process.run.remote(hooks.scope(), batch), f"agent_loop:{self.number}", "generate_sequences"
        )
