"""Agent loops by the name a dataset row gives in ``agent_name``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lineage.hooks import first_line
from lineage.trainer.agent_loop.base import AgentLoopBase, AgentLoopError, LoopContext, Session
from lineage.trainer.agent_loop.classes import is_class_path, load_class

LoopFactory = Callable[[LoopContext, Session], AgentLoopBase]

AGENT_LOOPS: dict[str, LoopFactory] = {}

_CONFIG = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
_PACKAGE = "pkg://"


def register(name: str) -> Callable[[type[AgentLoopBase]], type[AgentLoopBase]]:
    """Class decorator: make a loop known by ``name`` (verl ``register``)."""

    def add(loop: type[AgentLoopBase]) -> type[AgentLoopBase]:
        AGENT_LOOPS[name] = loop
        return loop

    return add


def agent_loop(name: str) -> LoopFactory:
    """What makes the loop of that name; ``module.Class`` and ``file.py:Class`` are names too.

    Raises:
        AgentLoopError: no such loop; the message lists those there are.
    """
    if name in AGENT_LOOPS:
        return AGENT_LOOPS[name]
    if is_class_path(name):
        return load_class(name, "agent_name", AgentLoopBase)
    raise AgentLoopError(f"unknown agent loop {name!r}: known are {', '.join(sorted(AGENT_LOOPS))}")


def register_agent_loops(path: str) -> None:
    """Register the loops of a YAML file: a list of ``{name, _target_: path of the class, more arguments}``.

    Args:
        path: ``actor_rollout_ref.rollout.agent.agent_loop_config_path``: a file, or ``pkg://package/file.yaml``.

    Raises:
        AgentLoopError: no such file, not such a list, a class that cannot be loaded or takes other arguments.
    """
    where = f"{_CONFIG}={path}"
    file = _file(path)
    if file is None or not file.is_file():
        raise AgentLoopError(f"{where}: no such file")
    try:
        entries = OmegaConf.to_container(OmegaConf.create(file.read_text("utf-8")), resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise AgentLoopError(f"{where}: not readable YAML: {first_line(error)}") from error
    if not isinstance(entries, list):
        raise AgentLoopError(f"{where}: a list of {{name, _target_}} is needed")
    for number, entry in enumerate(entries, 1):
        name, factory = _configured(f"{where}: entry {number}", entry)
        AGENT_LOOPS[name] = factory


def _file(path: str) -> Traversable | None:
    """The file of a path; ``pkg://package/name`` is a file of an installed package, as Hydra writes it."""
    if not path.startswith(_PACKAGE):
        return Path(path).expanduser()
    package, _, name = path.removeprefix(_PACKAGE).partition("/")
    try:
        return resources.files(package) / name
    except (ModuleNotFoundError, TypeError, ValueError):
        return None


def _configured(where: str, entry: Any) -> tuple[str, LoopFactory]:
    """Name and factory of one entry of the file."""
    if not isinstance(entry, Mapping) or not all(isinstance(entry.get(key), str) for key in ("name", "_target_")):
        raise AgentLoopError(f"{where} needs name and _target_, the path of a class")
    options = {str(key): value for key, value in entry.items() if key not in ("name", "_target_")}
    loop: type[AgentLoopBase] = load_class(entry["_target_"], f"{where}: _target_", AgentLoopBase)
    try:
        inspect.signature(loop).bind(None, None, **options)
    except TypeError as error:
        raise AgentLoopError(f"{where}: {loop.__name__} {error}") from error
    return entry["name"], functools.partial(loop, **options)
