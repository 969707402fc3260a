"""The group ``experiment``: named sets of overrides, one YAML file each, chosen by ``+experiment=NAME``.

The files are Hydra's: they stand under ``experiment/`` in this package and begin with ``# @package _global_``. A user's
own file is chosen by its path, and needs no such line.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lineage.hooks import first_line
from lineage.trainer.config.errors import ConfigError

GROUP = "experiment"
_SUFFIXES = (".yaml", ".yml")


def names() -> list[str]:
    """The experiments of this package, in alphabetical order."""
    folder = resources.files("lineage.trainer.config") / GROUP
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))


def chosen(words: Sequence[str]) -> list[str]:
    """Names Hydra knows the chosen experiments by; a user's own files are made known to it first.

    Args:
        words: what was typed: a name of :func:`names`, or a path that ends in ``.yaml``.

    Raises:
        ConfigError: no experiment of that name (with the nearest and the list), or a file that cannot be read.
    """
    return [_own(word, i) if word.endswith(_SUFFIXES) else _ours(word) for i, word in enumerate(words)]


def _ours(word: str) -> str:
    known = names()
    if word not in known:
        near = difflib.get_close_matches(word, known, n=1)
        meant = f": did you mean {near[0]}?" if near else ";"
        raise ConfigError(f"+experiment={word}: no such experiment{meant} there are {', '.join(known)}")
    return word


def _own(word: str, number: int) -> str:
    """Put a user's file into Hydra's store, under a name of its own: a path may be no word of Hydra's."""
    try:
        node = OmegaConf.load(Path(word).expanduser())
    except OSError as error:
        raise ConfigError(f"+experiment={word}: cannot read the file: {error.strerror}") from error
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"+experiment={word}: not YAML{_line(error)}: {first_line(error)}") from error
    if not isinstance(node, DictConfig):
        raise ConfigError(f"+experiment={word}: not a mapping of keys such as `data: {{train_batch_size: 4}}`")
    name = f"file_{number}"
    ConfigStore.instance().store(group=GROUP, name=name, node=node, package="_global_")
    return name


def _line(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f" at line {mark.line + 1}"
