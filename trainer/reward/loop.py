"""The reward worker of the agent loop (verl ``RewardLoopWorker``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lineage.hooks import traced
from lineage.trainer.reward.manager import NaiveRewardManager, Score


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
            st.consume({"responses": [torch.as_tensor(response_ids)]}, keys=[key], producer="AgentLoopWorker.run")
            result = await self.manager.run_single(response_ids, row)
            sources = {"data_source": [str(row.get("data_source"))]}
            st.score({"rm_scores": torch.tensor([result.score])}, keys=[key], columns=sources)
        return result
