"""Composing a configuration from dotted overrides: Hydra's grammar and experiments, no ``outputs/`` folder, no logging.

Hydra composes the defaults and the experiments, once a process; the overrides are then applied as it would, a tenth of
the time of a composition.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lineage.hooks import first_line
from lineage.trainer.config import experiments, tree
from lineage.trainer.config.errors import ConfigError
from lineage.trainer.config.ppo_trainer import PPOTrainerConfig

_NAME = "ppo_trainer"

# Shortcuts of DESIGN: `model.path=smollm2`, `rollout.n=2`.
ALIASES = {"model": "actor_rollout_ref.model", "rollout": "actor_rollout_ref.rollout"}


@dataclass(frozen=True)
class _Typed:
    """What a command line asks for.

    Attributes:
        values: (full dotted key, value) in the order given.
        experiments: the experiments chosen, as they were typed.
    """

    values: tuple[tuple[str, Any], ...]
    experiments: tuple[str, ...]


def compose(overrides: Sequence[str] = ()) -> DictConfig:
    """The configuration with verl-style dotted overrides applied.

    Args:
        overrides: ``key=value`` as Hydra reads them; ``model.`` and ``rollout.`` are short for
            ``actor_rollout_ref.model.`` and ``actor_rollout_ref.rollout.``; a ``+`` before a known key is allowed.
            ``+experiment=NAME`` (or a list of names, or the path of a YAML file) stands anywhere among them: the
            dotted keys are applied over it.

    Some defaults follow what is typed, by the user or in an experiment: ``total_training_steps`` is null when only
    ``total_epochs`` is given, ``ppo_mini_batch_size`` is no greater than a smaller ``train_batch_size``, and with
    ``mode=ray`` nobody records in a process of its own. ``n_ranks`` becomes ``nnodes`` and ``n_gpus_per_node``,
    and ``actor.ulysses_sequence_parallel_size`` is that of ``actor.fsdp_config``.

    Raises:
        ConfigError: an override that is not one, an unknown key or experiment (with the nearest valid ones) or a
            value of the wrong type, in one line.
    """
    asked = _read(overrides)
    groups = experiments.chosen(asked.experiments)
    typed = {*_experiment_keys(groups, asked.experiments), *(key for key, _ in asked.values)}
    config = _base(groups, asked.experiments)
    for key, value in asked.values:
        _set(config, key, value)
    if "trainer.total_epochs" in typed and "trainer.total_training_steps" not in typed:
        config.trainer.total_training_steps = None
    actor = config.actor_rollout_ref.actor
    if "actor_rollout_ref.actor.ppo_mini_batch_size" not in typed and config.data.train_batch_size > 0:
        actor.ppo_mini_batch_size = min(actor.ppo_mini_batch_size, config.data.train_batch_size)
    if config.mode == "ray" and "trace.sidecar" not in typed:
        config.trace.sidecar = False
    _expand_ranks(config, typed)
    _expand_sequence_parallel(config, typed)
    return config


def overridden(overrides: Sequence[str]) -> list[str]:
    """Full dotted names of the keys that overrides set, aliases resolved: an experiment's first, as it is applied."""
    asked = _read(overrides)
    groups = experiments.chosen(asked.experiments)
    return [*_experiment_keys(groups, asked.experiments), *(key for key, _ in asked.values)]


def _expand_ranks(config: DictConfig, typed: Collection[str]) -> None:
    """``trainer.n_ranks`` as the two sizes it is short for."""
    ranks = config.trainer.n_ranks
    if ranks is None:
        return
    for key in ("trainer.nnodes", "trainer.n_gpus_per_node"):
        if key in typed:
            raise ConfigError(f"trainer.n_ranks={ranks} is short for {key} and its like: set either, not both")
    config.trainer.nnodes, config.trainer.n_gpus_per_node = 1, ranks


def _expand_sequence_parallel(config: DictConfig, typed: Collection[str]) -> None:
    """verl's two names for one size: the actor's is short for that of its engine."""
    actor, key = config.actor_rollout_ref.actor, "ulysses_sequence_parallel_size"
    short, long = (f"actor_rollout_ref.actor.{section}{key}" for section in ("", "fsdp_config."))
    if short not in typed:
        actor[key] = actor.fsdp_config[key]
    elif long in typed and actor[key] != actor.fsdp_config[key]:
        raise ConfigError(f"{short}={actor[key]} is short for {long}={actor.fsdp_config[key]}: set either, not both")
    else:
        actor.fsdp_config[key] = actor[key]


def _base(groups: Sequence[str], words: Sequence[str]) -> DictConfig:
    """The configuration before anything typed: the defaults with the experiments over them."""
    lines = (f"+{experiments.GROUP}=[{','.join(groups)}]",) if groups else ()
    return _composed(_NAME, lines) if _has_own(groups, words) else copy.deepcopy(_packaged(_NAME, lines))


def _set(config: DictConfig, key: str, value: Any) -> None:
    """Apply one override as Hydra does; free keys are added to a map, whether it or the key below it was typed."""
    try:
        OmegaConf.update(config, key, value, merge=True, force_add=tree.kinds().get(key) != "value")
    except OmegaConfBaseException as error:
        raise ConfigError(_one_line(error)) from error


def _has_own(groups: Sequence[str], words: Sequence[str]) -> bool:
    """Whether an experiment is a user's file, which may change: Hydra knows it by another name than was typed."""
    return list(groups) != list(words)


@functools.cache
def _packaged(name: str, lines: tuple[str, ...] = ()) -> DictConfig:
    """A composition of nothing but this package's files; not to be changed."""
    return _composed(name, lines)


def _composed(name: str, lines: Sequence[str] = ()) -> DictConfig:
    _register()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("lineage.trainer.config", version_base=None):
            return hydra_compose(config_name=name, overrides=list(lines))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_one_line(error)) from error


@functools.cache
def _register() -> None:
    """Tell Hydra of the tree, once: it costs as much as a whole composition."""
    ConfigStore.instance().store(name=_NAME, node=PPOTrainerConfig)


def _experiment_keys(groups: Sequence[str], words: Sequence[str]) -> list[str]:
    """Full dotted names of the keys the experiments set, those of their own defaults lists too."""
    found: list[str] = []
    for group, word in zip(groups, words, strict=True):
        composed = _composed if _has_own([group], [word]) else _packaged
        node = OmegaConf.to_container(composed(f"{experiments.GROUP}/{group}"))
        found.extend(tree.keys_set(node, f"+{experiments.GROUP}={word}"))
    return found


def _read(overrides: Sequence[str]) -> _Typed:
    """Overrides read by Hydra's grammar; experiments apart from keys.

    Raises:
        ConfigError: an override that is not key=value, or names no key.
    """
    values: list[tuple[str, Any]] = []
    chosen: list[str] = []
    for line in overrides:
        override = _parse(line)
        if override.key_or_group == experiments.GROUP:
            value = override.value()
            chosen.extend(map(str, value if isinstance(value, list) else [value]))
            continue
        key = override.key_or_group
        head, _, rest = key.partition(".")
        if head in ALIASES and rest:
            key = f"{ALIASES[head]}.{rest}"
        tree.need_key(key, f"override {override.key_or_group!r}")
        values.append((key, override.value()))
    return _Typed(tuple(values), tuple(dict.fromkeys(chosen)))


@functools.lru_cache(maxsize=1024)
def _parse(line: str) -> Override:
    try:
        override: Override = OverridesParser.create().parse_override(line)
    except HydraException as error:
        raise ConfigError(f"override {line!r} is not key=value: {first_line(error)}") from error
    if override.type not in (OverrideType.CHANGE, OverrideType.ADD, OverrideType.FORCE_ADD):
        raise ConfigError(f"override {line!r}: a key of the configuration cannot be deleted; set it with key=value")
    if override.is_sweep_override():
        raise ConfigError(f"override {line!r} names several values; for a list, write {override.key_or_group}=[a,b]")
    return override


def _one_line(error: BaseException) -> str:
    """OmegaConf's reason, which Hydra wraps: its first line, and the key it names."""
    inner = error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error.__context__
    cause = inner if isinstance(inner, OmegaConfBaseException) else error
    message = first_line(cause)
    key = getattr(cause, "full_key", None)
    return f"{key}: {message}" if key else message


def resolved(config: DictConfig) -> dict[str, Any]:
    """The configuration as plain Python, interpolations resolved."""
    return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)


def to_yaml(config: DictConfig) -> str:
    """The resolved configuration as YAML, as ``--cfg job`` prints it and the run folder keeps it."""
    return OmegaConf.to_yaml(config, resolve=True)


def save(config: DictConfig, folder: Path) -> Path:
    """Write ``config.yaml`` into a run folder; returns its path."""
    path = folder / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    return path
