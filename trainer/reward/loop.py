"""The reward worker of the agent loop (verl ``RewardLoopWorker``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lineage.hooks import traced
from lineage.trainer.reward.manager import NaiveRewardManager, Reading, Score


class RewardLoopWorker:
    """Scores trajectories one by one as their sessions end."""

    def __init__(self, manager: NaiveRewardManager) -> None:
        self.manager = manager

    async def compute_score(self, key: str, response_ids: Sequence[int], row: Mapping[str, Any]) -> Score:
        """Score of one trajectory.

        Args:
            key: trajectory key ``{uid}_{session_id}_{index}``.
            response_ids: all response tokens, observations included.
            row: the dataset row: ``data_source``, ``reward_model.ground_truth``, ``extra_info``.

        Raises:
            RewardError: the score cannot be computed.
        """
        with traced("reward", component="RewardLoopWorker.compute_score", consumer="AgentLoopWorker.run") as st:
            given = Reading(response_ids, row.get("reward_model"))
            try:
                result = await self.manager.run_single(response_ids, row)
            except Exception:  # the trajectory has no score, whatever the caller makes of the error
                _record_reading(st, key, given)
                st.filter([key], columns={"status": ["failure"], "reason": ["failed"]})
                raise
            _record_reading(st, key, result.read or given)
            _record(st, key, result.score, row)
        return result


def record_own_score(key: str, score: float, row: Mapping[str, Any]) -> float:
    """Trace a score that the agent loop gave itself, where no scorer is asked.

    Returns:
        The score.
    """
    with traced("reward", component="AgentLoop.run", consumer="AgentLoopWorker.run") as stage:
        _record(stage, key, score, row)
    return score


def _record_reading(stage: Any, key: str, read: Reading) -> None:
    tokens = torch.as_tensor(read.response_ids, dtype=torch.int64)
    fields = {"responses": [tokens], "reward_model": [read.reward_model]}
    stage.consume(fields, keys=[key], producer="AgentLoopWorker.run")


def _record(stage: Any, key: str, score: float, row: Mapping[str, Any]) -> None:
    sources = {"data_source": [str(row.get("data_source"))]}
    stage.score({"rm_scores": torch.tensor([score])}, keys=[key], columns=sources)
