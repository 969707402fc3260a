"""Output formats of a check: each renders the outcomes of all traces as one text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lineage.checks.formats import json, text
from lineage.checks.report import Outcome

#: what ``--format`` takes
FORMATS: dict[str, Callable[[Sequence[Outcome]], str]] = {
    "text": text.render,
    "json": json.render,
}

__all__ = ["FORMATS"]
