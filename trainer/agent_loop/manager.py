"""Deals prompts to agent-loop workers and returns at once; the queue says when a group is done."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from lineage.trainer.agent_loop.base import AgentLoopError
from lineage.trainer.agent_loop.classes import load_class
from lineage.trainer.agent_loop.worker import AgentLoopWorker
from lineage.trainer.protocol import DataProto

_NEEDED = ("generate_sequences", "running", "join", "cancel")


class AgentLoopManager:
    """Runs the workers as tasks of the running event loop (verl ``AgentLoopManagerTQ``).

    Another one is named by ``rollout.agent.agent_loop_manager_class`` and is made with the same workers. Of it the
    trainer needs ``generate_sequences(batch)``, which leaves in the queue (``workers[0].queue``) the outputs under
    ``{uid}_{session_id}_{index}`` and, after them, a terminal status under each uid; ``running``, ``join`` and
    ``cancel``, which say when nobody writes any more. A subclass has those three, for whatever it starts by
    :meth:`start`.
    """

    def __init__(self, workers: Sequence[AgentLoopWorker]) -> None:
        if not workers:
            raise ValueError("at least one agent-loop worker is needed")
        self.workers = list(workers)
        self._tasks: list[asyncio.Task[None]] = []

    def generate_sequences(self, batch: DataProto) -> None:
        """Start the sessions of every row and return; outputs and statuses appear in the queue.

        Args:
            batch: one row a prompt, with ``uid`` and ``raw_prompt``; ``meta_info``: ``global_steps``,
                ``partition_id``, ``expected`` (sessions a prompt), ``sampling_params``.
        """
        shares = np.array_split(np.arange(len(batch)), len(self.workers))
        for worker, share in zip(self.workers, shares, strict=True):
            if len(share):
                self.start(worker, batch[share.tolist()])

    def start(self, worker: AgentLoopWorker, batch: DataProto) -> None:
        """Give a worker prompts to run, beside what it runs already."""
        self._tasks.append(asyncio.create_task(worker.run(batch)))

    @property
    def running(self) -> bool:
        """True while a worker still works: until then a group that is not terminal may become so."""
        return any(not task.done() for task in self._tasks)

    async def join(self) -> None:
        """Wait for every worker to end, so that nothing is written behind the step's back.

        Raises:
            Exception: the first error that ended a worker, a user's mistake above all.
        """
        tasks, self._tasks = self._tasks, []
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def cancel(self) -> None:
        """Stop every worker and wait until it has stopped."""
        for task in self._tasks:
            task.cancel()
        tasks, self._tasks = self._tasks, []
        await asyncio.gather(*tasks, return_exceptions=True)


def agent_loop_manager_class(path: str | None) -> type[Any]:
    """The manager ``rollout.agent.agent_loop_manager_class`` names, :class:`AgentLoopManager` when it names none.

    Raises:
        AgentLoopError: it cannot be loaded, or lacks a method the trainer calls.
    """
    if path is None:
        return AgentLoopManager
    where = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
    found = load_class(path, where, object)
    lacking = [name for name in _NEEDED if not hasattr(found, name)]
    if lacking:
        raise AgentLoopError(
            f"{where}={path}: {found.__name__} has no {', '.join(lacking)}; "
            "subclass lineage.trainer.agent_loop.AgentLoopManager to have what is not its own"
        )
    return found
