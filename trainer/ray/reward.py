"""Reward workers in processes of their own, and the scorer as the agent loops of other processes see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lineage import hooks
from lineage.hooks import Scope
from lineage.trainer.ray.errors import await_result
from lineage.trainer.ray.recording import RunProcess, RunTrace
from lineage.trainer.reward import RewardLoopWorker, Score, reward_manager
from lineage.trainer.setup import source_and_tokenizer


class RewardProcess(RunProcess):
    """Scores trajectories as their sessions end (verl's ``RewardLoopWorker`` actor).

    Args:
        trace: how the process records.
        number: of the worker.
        config: the configuration.
    """

    def __init__(self, trace: RunTrace, number: int, config: Any) -> None:
        super().__init__(trace, f"reward:{number}")
        _, tokenizer = source_and_tokenizer(config)
        self.worker = RewardLoopWorker(reward_manager(config.reward, tokenizer))

    async def compute_score(
        self, scope: Scope | None, key: str, response_ids: list[int], row: Mapping[str, Any]
    ) -> Score:
        """Score of one trajectory, in the stage of its session."""
        with hooks.inside(scope):
            return await self.worker.compute_score(key, response_ids, row)


class RemoteScorer:
    """The reward workers as an agent loop asks them, in turn.

    Args:
        workers: handles of :class:`RewardProcess`.
    """

    def __init__(self, workers: Sequence[Any]) -> None:
        self.workers = list(workers)
        self._asked = 0

    async def compute_score(self, key: str, response_ids: list[int], row: Mapping[str, Any]) -> Score:
        """See :meth:`lineage.trainer.reward.RewardLoopWorker.compute_score`."""
        number = self._asked % len(self.workers)
        self._asked += 1
        asked = self.workers[number].compute_score.remote(hooks.scope(), key, list(response_ids), dict(row))
        score: Score = await await_result(asked, f"reward:{number}", "compute_score")
        return score
