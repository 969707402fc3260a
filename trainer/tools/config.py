"""Tools and interactions of ``multi_turn.tool_config_path`` and ``interaction_config_path`` (verl's YAML)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lineage.hooks import first_line
from lineage.trainer.agent_loop.classes import load_class
from lineage.trainer.tools.base import BaseTool, ToolError
from lineage.trainer.tools.calculator import Calculator
from lineage.trainer.tools.interaction import BaseInteraction
from lineage.trainer.tools.lookup import Lookup

Made = TypeVar("Made")

TOOLS: dict[str, type[BaseTool]] = {"calculator": Calculator, "lookup": Lookup}
"""Built-in tools by name; a configuration may use the name for ``class_name``."""


def load_tools(path: str | None) -> dict[str, BaseTool]:
    """Tools by name: the file's, or the built-in ones where there is no file.

    The file is ``tools: [{class_name, config: {type: native, ...}, tool_schema}]``; ``tool_schema`` may be left out
    where the class has its own.

    Raises:
        ToolError: a file that cannot be read, an entry that makes no tool, or a name twice.
        AgentLoopError: a class that cannot be found.
    """
    if path is None:
        return {name: kind() for name, kind in TOOLS.items()}
    key, tools = "actor_rollout_ref.rollout.multi_turn.tool_config_path", {}
    for place, entry in enumerate(_entries(key, path, "tools")):
        where = f"{key}={path}: tools[{place}]"
        config = entry.get("config") or {}
        if not isinstance(config, Mapping):
            raise ToolError(f"{where}: config is not a mapping")
        if config.get("type", "native") != "native":
            raise ToolError(f"{where}: config.type={config['type']} is unknown; known: native")
        tool = _make(where, entry, BaseTool, TOOLS, config, entry.get("tool_schema"))
        if tool.name in tools:
            raise ToolError(f"{where}: a second tool named {tool.name}")
        tools[tool.name] = tool
    return tools


def load_interactions(path: str | None) -> dict[str, BaseInteraction]:
    """Interactions by name, none where there is no file: ``interaction: [{name, class_name, config}]``.

    Raises:
        ToolError: a file that cannot be read, an entry that makes no interaction, or a name twice.
        AgentLoopError: a class that cannot be found.
    """
    if path is None:
        return {}
    key, found = "actor_rollout_ref.rollout.multi_turn.interaction_config_path", {}
    for place, entry in enumerate(_entries(key, path, "interaction")):
        where = f"{key}={path}: interaction[{place}]"
        name = entry.get("name")
        if not isinstance(name, str) or name in found:
            raise ToolError(f"{where}: name={name!r} is no name of its own")
        found[name] = _make(where, entry, BaseInteraction, {}, entry.get("config"))
    return found


def _entries(key: str, path: str, section: str) -> list[Mapping[str, Any]]:
    try:
        data = OmegaConf.to_container(OmegaConf.load(Path(path).expanduser()), resolve=True)
    except FileNotFoundError as error:
        raise ToolError(f"{key}={path}: no such file") from error
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise ToolError(f"{key}={path}: not a readable YAML file: {first_line(error)}") from error
    entries = data.get(section) if isinstance(data, Mapping) else None
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise ToolError(f"{key}={path}: no list {section!r} of mappings with class_name and config")
    return entries


def _make(where: str, entry: Mapping[str, Any], base: type[Made], known: Mapping[str, type[Made]], *given: Any) -> Made:
    """An object of the entry's ``class_name``: a known name, or a path (see ``agent_loop.classes``)."""
    name = str(entry.get("class_name"))
    kind: type[Made] = known[name] if name in known else load_class(name, f"{where}.class_name", base)
    try:
        return kind(*given)
    except ToolError as error:
        raise ToolError(f"{where}: {error}") from error
    except Exception as error:  # the class's own code
        raise ToolError(f"{where}: {name} cannot be made: {type(error).__name__}: {first_line(error)}") from error
