"""The trainer's configuration.

Enters: dotted overrides as verl users type them. Leaves: one resolved ``DictConfig`` of verl's names, and its
YAML. Imported by the trainer and by ``lineage run``; imports no torch.
"""

from lineage.trainer.config.compose import compose, overridden, resolved, save, to_yaml
from lineage.trainer.config.errors import ConfigError
from lineage.trainer.config.ppo_trainer import PPOTrainerConfig
from lineage.trainer.config.tree import keys
from lineage.trainer.config.validate import (
    adapt_to_mode,
    loggers,
    need_reference_policy,
    sequence_parallel_size,
    validate_config,
)

__all__ = [
    "ConfigError",
    "PPOTrainerConfig",
    "adapt_to_mode",
    "compose",
    "keys",
    "loggers",
    "need_reference_policy",
    "overridden",
    "resolved",
    "save",
    "sequence_parallel_size",
    "to_yaml",
    "validate_config",
]
