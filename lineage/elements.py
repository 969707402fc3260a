"""What is known of each key: its tags and its slot, as the queue's calls told the recorder.

Every row about a trajectory carries the tags of its keys, so that a check can tell padding from data in any stage. Most
rows of a step share one list of keys, so the columns are kept per list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# tag of the queue -> column of the schema
TAG_COLUMNS: dict[str, str] = {
    "is_padding": "is_padding",
    "global_steps": "global_steps_tag",
    "min_global_steps": "min_global_steps",
    "max_global_steps": "max_global_steps",
    "status": "status",
    "expected": "expected",
    "finish_reason": "finish_reason",
    "num_turns": "num_turns",
    "generated": "generated",
    "reason": "reason",
}
LENGTH_TAGS = ("prompt_len", "response_len", "seq_len")
KNOWN_TAGS = frozenset({*TAG_COLUMNS, *LENGTH_TAGS})

# tags that stay what they are while the key lives, and the key's place in the queue: every row of the key carries them
_LASTING = ("is_padding", "global_steps", "min_global_steps", "max_global_steps", "slot")
TAG_NAMES = frozenset(TAG_COLUMNS.get(name, name) for name in _LASTING)

_KEPT_LISTS = 64
_NO_TAGS: dict[str, Any] = {}

Tags = dict[str, list[Any]]  # values by column, one an element


def tag_columns(tags: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Columns of the tags given with a call; those no tag has are left out."""
    return {
        column: [one.get(tag) for one in tags] for tag, column in TAG_COLUMNS.items() if any(tag in one for one in tags)
    }


class Elements:
    """Tags by key, and the columns made of them by list of keys."""

    def __init__(self) -> None:
        self._tags: dict[str, dict[str, Any]] = {}
        self._columns: dict[tuple[str, ...], tuple[tuple[str, ...], Tags, Tags]] = {}
        self._asked: set[str] = set()  # keys in a kept list that had no tags

    def note_slots(self, keys: Sequence[str], slots: Sequence[int]) -> None:
        """Remember the places of keys in the queue."""
        self.note(keys, [{"slot": slot} for slot in slots])

    def note(self, keys: Sequence[str], tags: Sequence[Mapping[str, Any]]) -> None:
        """Merge tags into what is known of ``keys``."""
        stale = False
        for key, tag in zip(keys, tags, strict=True):
            known = self._tags.get(key)
            if known is None:
                self._tags[key] = dict(tag)
                stale = stale or key in self._asked
            else:
                stale = stale or any(known.get(name) != tag.get(name) for name in _LASTING if name in tag)
                known.update(tag)
        if stale:
            self._columns.clear()

    def forget(self, keys: Sequence[str]) -> None:
        """Drop what is known of cleared keys."""
        for key in keys:
            self._tags.pop(key, None)
        self._columns.clear()
        self._asked.clear()

    def columns(self, keys: tuple[str, ...], *, queue: bool) -> tuple[tuple[str, ...], Tags]:
        """The list of keys as it was first seen, and its tag columns; only those at least one key has a tag for.

        A key that has tags but no ``is_padding`` is not padding.

        Args:
            keys: keys of a row.
            queue: the row passed through the queue, so its keys have slots.
        """
        known = self._columns.get(keys)
        if known is None:
            tags = [self._tags.get(key) for key in keys]
            self._asked.update(key for key, tag in zip(keys, tags, strict=True) if tag is None)
            columns: Tags = {}
            for name in _LASTING:
                values = [None if tag is None else tag.get(name) for tag in tags]
                if name == "is_padding":
                    values = [None if tag is None else bool(value) for tag, value in zip(tags, values, strict=True)]
                if any(value is not None for value in values):
                    columns[TAG_COLUMNS.get(name, name)] = values
            if len(self._columns) >= _KEPT_LISTS:
                self._columns.clear()
                self._asked.clear()
            outside = {name: values for name, values in columns.items() if name != "slot"}
            known = self._columns[keys] = (keys, columns, outside)
        return known[0], known[1] if queue else known[2]

    def lengths(self, keys: Sequence[str], tag: str) -> NDArray[np.int64] | None:
        """``(n,)`` length tags of the keys (``prompt_len``, ``seq_len``), or None where one is not known."""
        values = [self._tags.get(key, _NO_TAGS).get(tag) for key in keys]
        return None if None in values else np.array(values, dtype=np.int64)
