"""Reward managers: from a trajectory's tokens to its score."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig
from transformers import PreTrainedTokenizerBase

from lineage.trainer.reward.errors import RewardError
from lineage.trainer.reward.registry import Scorer, arguments_of, load_scorer, scorer_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reading:
    """What a score was made from: whoever holds it against what the scorer was to read has it from the scorer's side.

    Attributes:
        response_ids: the tokens whose text was scored.
        reward_model: the ground truth beside them.
    """

    response_ids: Sequence[int]
    reward_model: Any


@dataclass(frozen=True)
class Score:
    """A trajectory's score.

    Attributes:
        score: what the advantage is computed from.
        extra: other keys a scorer's dict had; ``acc``, the score again, when it returned a number (verl's name).
        read: what it was made from; None of a manager that does not say it.
    """

    score: float
    extra: dict[str, Any] = field(default_factory=dict)
    read: Reading | None = field(default=None, compare=False, repr=False)

    @property
    def reward_extra_info(self) -> dict[str, Any]:
        """The score and all that was said beside it, by verl's name for it."""
        return {"score": self.score, **self.extra}


class NaiveRewardManager:
    """Decodes the response and calls the scorer (verl ``naive``).

    Args:
        config: the ``reward`` section.
        tokenizer: decodes; special tokens are left out.
    """

    def __init__(self, config: DictConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.scorer: Scorer | None = load_scorer(config)

    async def run_single(self, response_ids: Sequence[int], row: Mapping[str, Any]) -> Score:
        """Score one response of a dataset row.

        A score that is NaN or infinite is taken, as in verl, with a warning.

        Raises:
            RewardError: no scorer for the row, or it returned neither a number nor a dict with ``score``.
        """
        read = Reading(list(response_ids), row.get("reward_model"))
        solution = self.tokenizer.decode(read.response_ids, skip_special_tokens=True)
        scorer = self.scorer or scorer_of(row.get("data_source"))
        result = scorer(**arguments_of(row, solution))
        if inspect.isawaitable(result):
            result = await result
        extra = dict(result) if isinstance(result, Mapping) else {"score": result}
        try:
            score = float(extra.pop("score"))
        except (KeyError, TypeError, ValueError) as error:
            raise RewardError(
                f"{_name(scorer)} returned {result!r}: a number or a dict with 'score' is needed"
            ) from error
        if not math.isfinite(score):
            logger.warning("%s returned %s: no advantage of its group is a number", _name(scorer), score)
        return Score(score, extra if isinstance(result, Mapping) else {"acc": score}, read)


def _name(scorer: Scorer) -> str:
    function = getattr(scorer, "func", scorer)  # the user's own is a partial
    return str(getattr(function, "__name__", "scorer"))


MANAGERS = {"naive": NaiveRewardManager}


def reward_manager(config: DictConfig, tokenizer: PreTrainedTokenizerBase) -> NaiveRewardManager:
    """The manager ``reward.reward_manager`` names.

    Raises:
        RewardError: there is none of that name.
    """
    if config.reward_manager not in MANAGERS:
        raise RewardError(f"reward.reward_manager={config.reward_manager} is unknown; known: {', '.join(MANAGERS)}")
    return MANAGERS[config.reward_manager](config, tokenizer)
