"""Trajectory keys as the trainer writes them: ``{uid}_{session_id}_{index}``.

A uid may itself hold underscores, so a key is read from the right.
"""

from __future__ import annotations

from typing import NamedTuple


class TrajectoryKey(NamedTuple):
    """One output of one session of one prompt group."""

    uid: str
    session_id: int
    index: int  # type: ignore[assignment]  # tuple has a method of that name

    def __str__(self) -> str:
        return f"{self.uid}_{self.session_id}_{self.index}"


def parse_key(key: str) -> TrajectoryKey:
    """Read a trajectory key.

    Raises:
        ValueError: it is none; a prompt key, for one, is a bare uid.
    """
    parts = key.rsplit("_", 2)
    if len(parts) != 3 or not parts[0] or not all(part.isascii() and part.isdigit() for part in parts[1:]):
        raise ValueError(f"{key!r} is not a trajectory key {{uid}}_{{session_id}}_{{index}}")
    return TrajectoryKey(parts[0], int(parts[1]), int(parts[2]))
