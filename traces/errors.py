"""The error of a trace that cannot be read."""

from __future__ import annotations

from lineage.errors import UserError


class TraceError(UserError):
    """A trace that cannot be read: what is wrong, where, and how to mend it, in one line."""


def first_line(error: BaseException) -> str:
    """What an error says, in one line of at most 120 characters; its kind where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:120]
