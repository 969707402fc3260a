"""Output formats of a report: ``text`` for people, ``json`` for programs."""

from __future__ import annotations

from lineage.checks.formats.json import to_json
from lineage.checks.formats.text import to_text

__all__ = ["to_json", "to_text"]
