"""Who scores, and when: the worker inside the agent loop, or the manager over a sampled batch (colocated).

verl's ``RewardLoopManager``. Its colocated path is for a reward model that shares the devices of the actor and so has
to wait until the rollout sleeps. Here the same reward managers serve it: a rule stands in for the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lineage.hooks import UserError
from lineage.trainer.protocol import DataProto
from lineage.trainer.reward.errors import RewardError
from lineage.trainer.reward.loop import RewardLoopWorker
from lineage.trainer.reward.manager import NaiveRewardManager, Score

# what a rule reads of the dataset row, and verl's reward model of the trajectory
ROW_FIELDS = ("data_source", "reward_model", "extra_info")
INPUT_FIELDS = ("prompts", "responses", "raw_prompt")
# where a scored batch keeps the names of the fields that hold what the scorer said beside the score
EXTRA_KEYS = "reward_extra_keys"
# where it keeps what each row was scored from, as the scorer's side says it
READ = "reward_read"


class RewardLoopManager:
    """Hands out the session scorer, or scores whole batches.

    Args:
        manager: decodes and judges one response.
        colocated: score batches (``reward.reward_model.enable`` without a resource pool of its own).
    """

    def __init__(self, manager: NaiveRewardManager, *, colocated: bool) -> None:
        self.manager = manager
        self.colocated = colocated

    @property
    def session_scorer(self) -> RewardLoopWorker | None:
        """Scores sessions in the agent loop; None where batches are scored after it."""
        return None if self.colocated else RewardLoopWorker(self.manager)

    async def compute_rm_score(self, data: DataProto) -> DataProto:
        """Score every row of a padded batch, whichever output of its session it is.

        Args:
            data: ``prompts`` (batch, prompt width) padded on the left, ``responses`` (batch, response width) on the
                right, ``attention_mask`` (batch, both widths), and as objects the fields of ``ROW_FIELDS``.

        Returns:
            ``rm_scores`` (batch, response width) float32, the score on the last response token; what the scorer said
            beside it as objects, their names in ``meta_info`` under ``EXTRA_KEYS``; there under ``READ`` what each row
            was scored from, None of a manager that does not say it.

        Raises:
            RewardError: a score cannot be computed, or rows differ in what was said beside it.
        """
        responses = data.batch["responses"]
        lengths = data.batch["attention_mask"][:, -responses.shape[1] :].sum(dim=1)
        scores = await asyncio.gather(*(self._score(data, row, lengths) for row in range(len(data))))
        rm_scores = torch.zeros(responses.shape)
        rm_scores[torch.arange(len(data)), lengths - 1] = torch.tensor([score.score for score in scores])
        infos = [score.reward_extra_info for score in scores]
        extra = {name: [info[name] for info in infos] for name in _same_keys(infos)}
        said = {EXTRA_KEYS: list(extra), READ: [score.read for score in scores]}
        return DataProto.from_dict({"rm_scores": rm_scores, **extra}, said)

    async def _score(self, data: DataProto, row: int, lengths: Tensor) -> Score:
        columns = data.non_tensor_batch
        fields = {name: columns[name][row] for name in ROW_FIELDS if name in columns}
        response = data.batch["responses"][row, : int(lengths[row])].tolist()
        try:
            return await self.manager.run_single(response, fields)
        except UserError:
            raise
        except Exception as error:  # the user's own function; in the agent loop it fails its session, here the batch
            source = fields.get("data_source")
            raise RewardError(f"the scorer of a row of {source} raised {type(error).__name__}: {error}") from error


def _same_keys(infos: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys of every row: a field that one row lacks is lost for the whole batch."""
    first = list(infos[0]) if infos else []
    for info in infos:
        if set(info) != set(first):
            raise RewardError(
                f"the scorer returned {', '.join(sorted(first))} for one row and {', '.join(sorted(info))} for "
                "another: give every row of a batch the same keys"
            )
    return first
