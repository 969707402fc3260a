"""Text that comes out of a trace, made safe for a line of a report.

Keys, fields and details are whatever a run recorded. A line break in one could make up lines of a report, a control
character could steer a terminal, and XML cannot hold most of them at all.
"""

from __future__ import annotations


def plain(text: str) -> str:
    r"""The text with every character that does not print as its Python escape: ``\n``, ``\x00``, ``\u202e``.

    What prints, in any script, and the space stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


def shortened(text: str, length: int) -> str:
    """At most so many characters of it, the last of them an ellipsis if any were left out."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def plural(count: int, word: str) -> str:
    """``1 violation``, ``2 violations``."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"
