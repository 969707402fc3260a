"""Trajectory keys: ``{uid}_{session_id}_{index}``, read from the right because a uid may contain ``_``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrajectoryKey:
    """One AgentLoopOutput of one session of one prompt."""

    uid: str
    session_id: int
    index: int

    def __str__(self) -> str:
        return f"{self.uid}_{self.session_id}_{self.index}"


def parse_key(key: str) -> TrajectoryKey | None:
    """Split a trajectory key from the right.

    Returns:
        The parsed key, or None when ``key`` is not a trajectory key (a prompt key is a bare uid).
    """
    head, _, index = key.rpartition("_")
    uid, _, session = head.rpartition("_")
    if not uid or not _plain(session) or not _plain(index):
        return None
    return TrajectoryKey(uid, int(session), int(index))


def _plain(number: str) -> bool:
    """True for the one spelling of a non-negative integer that str() gives back."""
    return number.isascii() and number.isdigit() and (number == "0" or number[0] != "0")
