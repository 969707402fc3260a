"""Composing a configuration from dotted overrides, by Hydra's compose API: no ``outputs/`` folder, no logging."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lineage.hooks import first_line
from lineage.trainer.config.errors import ConfigError
from lineage.trainer.config.ppo_trainer import PPOTrainerConfig

_NAME = "ppo_trainer"

# Shortcuts of DESIGN: `model.path=smollm2`, `rollout.n=2`.
ALIASES = {"model": "actor_rollout_ref.model", "rollout": "actor_rollout_ref.rollout"}


def compose(overrides: Sequence[str] = ()) -> DictConfig:
    """The configuration with verl-style dotted overrides applied.

    Args:
        overrides: ``key=value`` as Hydra reads them; ``model.`` and ``rollout.`` are short for
            ``actor_rollout_ref.model.`` and ``actor_rollout_ref.rollout.``; a ``+`` before a known key is allowed.

    Two defaults follow what is typed: ``total_training_steps`` is null when only ``total_epochs`` is given, and
    ``ppo_mini_batch_size`` is no greater than a smaller ``train_batch_size``.

    Raises:
        ConfigError: an override that is not one, an unknown key (with the nearest valid ones) or a value of the
            wrong type, in one line.
    """
    parsed = [_parse(override) for override in overrides]
    typed = {key for key, _ in parsed}
    kinds = _kinds()
    lines = [f"{key}={value}" if key in kinds else f"++{key}={value}" for key, value in parsed]
    if "trainer.total_epochs" in typed and "trainer.total_training_steps" not in typed:
        lines.append("trainer.total_training_steps=null")
    _register()
    GlobalHydra.instance().clear()
    try:
        with initialize(version_base=None, config_path=None):
            config = hydra_compose(config_name=_NAME, overrides=lines)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_one_line(error)) from error
    actor = config.actor_rollout_ref.actor
    if "actor_rollout_ref.actor.ppo_mini_batch_size" not in typed and config.data.train_batch_size > 0:
        actor.ppo_mini_batch_size = min(actor.ppo_mini_batch_size, config.data.train_batch_size)
    return config


@functools.cache
def _register() -> None:
    """Tell Hydra of the tree, once: it costs as much as a whole composition."""
    ConfigStore.instance().store(name=_NAME, node=PPOTrainerConfig)


def overridden(overrides: Sequence[str]) -> list[str]:
    """Full dotted names of the keys that overrides set, aliases resolved, in the order given."""
    return [key for key, _ in map(_parse, overrides)]


def _parse(line: str) -> tuple[str, str]:
    """One override as (full dotted key, value text)."""
    try:
        override: Override = OverridesParser.create().parse_override(line)
    except HydraException as error:
        raise ConfigError(f"override {line!r} is not key=value: {first_line(error)}") from error
    if override.type not in (OverrideType.CHANGE, OverrideType.ADD, OverrideType.FORCE_ADD):
        raise ConfigError(f"override {line!r}: a key of the configuration cannot be deleted; set it with key=value")
    if override.is_sweep_override():
        raise ConfigError(f"override {line!r} names several values; for a list, write {override.key_or_group}=[a,b]")
    key = override.key_or_group
    head, _, rest = key.partition(".")
    if head in ALIASES and rest:
        key = f"{ALIASES[head]}.{rest}"
    kinds = _kinds()
    if not _known(key, kinds):
        raise ConfigError(f"unknown override {override.key_or_group!r}{_did_you_mean(key, list(kinds))}")
    if kinds.get(key) == "section":
        inside = [name for name, kind in kinds.items() if name.startswith(key + ".") and kind != "section"]
        raise ConfigError(f"override {key!r} names a whole section; set one of its keys, e.g. {inside[0]}=...")
    text = override.get_value_element_as_str()
    return key, text


def _known(key: str, kinds: dict[str, str]) -> bool:
    if key in kinds:
        return True
    parts = key.split(".")
    return any(kinds.get(".".join(parts[:i])) == "map" for i in range(1, len(parts)))


@functools.cache
def _kinds() -> dict[str, str]:
    """Every dotted name of the tree: ``section``, ``map`` (free keys below it) or ``value``."""
    return {name: kind for name, kind, _, _ in _walk(PPOTrainerConfig())}


def keys() -> Iterator[tuple[str, Any, dataclasses.Field]]:
    """Every settable key of the tree as (dotted name, default, dataclass field)."""
    for name, kind, default, field in _walk(PPOTrainerConfig()):
        if kind != "section":
            yield name, default, field


def _walk(node: Any, prefix: str = "") -> Iterator[tuple[str, str, Any, dataclasses.Field]]:
    for field in dataclasses.fields(node):
        name, value = f"{prefix}{field.name}", getattr(node, field.name)
        if dataclasses.is_dataclass(value):
            yield name, "section", value, field
            yield from _walk(value, f"{name}.")
        else:
            yield name, "map" if isinstance(value, dict) else "value", value, field


def _did_you_mean(key: str, names: list[str]) -> str:
    """Nearest valid names: by the whole path, then by the last word alone."""
    near = difflib.get_close_matches(key, names, n=2, cutoff=0.75)
    last = key.rpartition(".")[2]
    leaves = {name: name.rpartition(".")[2] for name in names}
    for leaf in difflib.get_close_matches(last, sorted(set(leaves.values())), n=2, cutoff=0.75):
        near.extend(name for name in names if leaves[name] == leaf and name not in near)
    near.sort(key=lambda name: difflib.SequenceMatcher(None, key, name).ratio(), reverse=True)
    return f": did you mean {' or '.join(near[:2])}?" if near else "; `lineage run --cfg job` prints every key"


def _one_line(error: BaseException) -> str:
    """Hydra wraps OmegaConf's reason: take the innermost, its first line, and the key it names."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
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
