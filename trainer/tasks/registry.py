"""Which task a name means, and its rows."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from lineage.hooks import MissingExtraError, UserError
from lineage.trainer.tasks import builtin, gym

Row = dict[str, Any]

SOURCES = {"builtin": builtin, "reasoning_gym": gym}


class TaskError(UserError):
    """A task that does not exist."""


def is_task(name: str) -> bool:
    """True for ``builtin:...`` and ``reasoning_gym:...``."""
    return name.partition(":")[0] in SOURCES and ":" in name


def make_rows(name: str, size: int, seed: int) -> list[Row]:
    """Rows of a made task in verl's prompt schema; the same seed gives the same rows.

    Args:
        name: ``builtin:<task>`` or ``reasoning_gym:<task>``.
        size: rows to make; -1 takes the source's own number.
        seed: of the rows.

    Raises:
        TaskError: unknown task, with the nearest ones or the list.
        MissingExtraError: the task's package is not installed; with the pip line.
    """
    source, _, task = name.partition(":")
    module = SOURCES[source]
    try:
        known = module.names()
    except ImportError as error:
        raise MissingExtraError(name, "tasks", "reasoning_gym") from error
    if task not in known:
        raise TaskError(f"unknown task {name!r}{_suggest(source, task, known)}")
    return module.make(task, module.ROWS if size < 0 else size, seed)


def _suggest(source: str, task: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(task, names, n=3, cutoff=0.6)
    if near:
        return f": did you mean {' or '.join(f'{source}:{name}' for name in near)}?"
    return f"; known: {', '.join(names)}"
