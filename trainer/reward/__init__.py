"""Rule rewards: a response decoded, scored against its row's ground truth.

Enters: response token ids and the dataset row. Leaves: one score a trajectory. Imported by the trainer, which hands a
``RewardLoopWorker`` to the agent loop, or has ``RewardLoopManager`` score the sampled batch.
"""

from lineage.trainer.reward.errors import RewardError
from lineage.trainer.reward.loop import RewardLoopWorker
from lineage.trainer.reward.loop_manager import RewardLoopManager
from lineage.trainer.reward.manager import NaiveRewardManager, Score, reward_manager
from lineage.trainer.reward.registry import SCORERS, Scorer, load_scorer, scorer_of

__all__ = [
    "SCORERS",
    "NaiveRewardManager",
    "RewardError",
    "RewardLoopManager",
    "RewardLoopWorker",
    "Score",
    "Scorer",
    "load_scorer",
    "reward_manager",
    "scorer_of",
]
