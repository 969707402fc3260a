"""The names of the configuration tree: which there are, what kind each is, and which one a wrong word meant."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from lineage.trainer.config.errors import ConfigError
from lineage.trainer.config.ppo_trainer import PPOTrainerConfig


def keys() -> Iterator[tuple[str, Any, dataclasses.Field]]:
    """Every settable key of the tree as (dotted name, default, dataclass field)."""
    for name, kind, default, field in _walk(PPOTrainerConfig()):
        if kind != "section":
            yield name, default, field


@functools.cache
def kinds() -> dict[str, str]:
    """Every dotted name of the tree: ``section``, ``map`` (free keys below it) or ``value``."""
    return {name: kind for name, kind, _, _ in _walk(PPOTrainerConfig())}


def need_key(key: str, said: str) -> None:
    """Check that a dotted name can be set.

    Args:
        key: full dotted name.
        said: how the user named it, and where, for the message.

    Raises:
        ConfigError: there is no such key (with the nearest valid ones), or it is a whole section.
    """
    known = kinds()
    if not _known(key, known):
        raise ConfigError(f"unknown {said}{_did_you_mean(key, list(known))}")
    if known.get(key) == "section":
        inside = [name for name, kind in known.items() if name.startswith(key + ".") and kind != "section"]
        raise ConfigError(f"{said} names a whole section; set one of its keys, e.g. {inside[0]}=...")


def keys_set(node: Mapping[Any, Any], where: str, prefix: str = "") -> Iterator[str]:
    """Full dotted names of the keys that a mapping of the tree's shape sets.

    Args:
        node: nested mapping, as read from a YAML file.
        where: the file, for the message.

    Raises:
        ConfigError: a name of the mapping is not one of the tree, or a section is set to a value.
    """
    for name, value in node.items():
        key = f"{prefix}{name}"
        if kinds().get(key) in ("section", "map") and isinstance(value, Mapping):
            yield from keys_set(value, where, f"{key}.")
        else:
            need_key(key, f"key {key!r} in {where}")
            yield key


def _known(key: str, known: dict[str, str]) -> bool:
    if key in known:
        return True
    parts = key.split(".")
    return any(known.get(".".join(parts[:i])) == "map" for i in range(1, len(parts)))


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
