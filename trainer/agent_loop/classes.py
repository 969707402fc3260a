"""A class of the user's, by the path a configuration or a dataset row gives."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from lineage.hooks import UserError, first_line
from lineage.trainer.agent_loop.base import AgentLoopError


def is_class_path(name: str) -> bool:
    """True for ``module.Class`` and ``file.py:Class``, false for a bare name."""
    return "." in name


def load_class(path: str, where: str, base: type) -> type[Any]:
    """The class a path names.

    Args:
        path: ``package.module.Class``, importable from the current folder too, or ``folder/file.py:Class``.
        where: the setting that gave it, for the error.
        base: what the class must be.

    Raises:
        AgentLoopError: not such a path, a module that cannot be imported, no such class, or one of another kind.
    """
    file, colon, name = path.rpartition(":")
    source = file if colon else path.rpartition(".")[0]
    name = name if colon else path.rpartition(".")[2]
    if not source or not name.isidentifier() or (colon and not file.endswith(".py")):
        raise AgentLoopError(f"{where}={path}: neither package.module.Class nor file.py:Class")
    try:
        module = _file_module(Path(file).expanduser().resolve()) if colon else _named_module(source)
    except UserError:
        raise
    except FileNotFoundError as error:
        raise AgentLoopError(f"{where}={path}: no such file") from error
    except Exception as error:
        raise AgentLoopError(f"{where}={path}: {type(error).__name__}: {first_line(error)}") from error
    found = getattr(module, name, None)
    if not isinstance(found, type):
        classes = [key for key, value in vars(module).items() if inspect.isclass(value) and issubclass(value, base)]
        raise AgentLoopError(f"{where}={path}: {source} has no class {name}; it has: {', '.join(classes) or 'none'}")
    if not issubclass(found, base):
        raise AgentLoopError(f"{where}={path}: {name} is not a {base.__name__}")
    return found


def _named_module(name: str) -> ModuleType:
    _importable(Path.cwd())
    return importlib.import_module(name)


@functools.cache
def _file_module(path: Path) -> ModuleType:
    """A Python file as a module, run once: its classes stay the same from session to session."""
    if not path.is_file():
        raise FileNotFoundError(path)
    _importable(path.parent)
    name = f"{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _importable(folder: Path) -> None:
    """Put a folder of the user's on the import path, behind everything installed: it must shadow nothing."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
