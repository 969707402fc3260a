"""What a given trainer legitimately does: its formulas and epsilons. A profile never loosens a code."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from lineage.checks.declared import leaves

_FOLDER = Path(__file__).parent / "profiles"
DEFAULT = "lineage"


@dataclass(frozen=True)
class Profile:
    """One trainer's conventions.

    Attributes:
        name: ``lineage``, ``verl`` or ``trl``.
        known: false when the trace names a profile nobody wrote; the default's conventions are then used.
        values: what it says, by dotted name.
    """

    name: str
    known: bool
    values: Mapping[str, str | None]

    def table(self) -> pa.Table:
        """Names and values, for queries."""
        texts = (pa.array(list(column), pa.string()) for column in (self.values.keys(), self.values.values()))
        return pa.table(dict(zip(("name", "value"), texts, strict=True)))


def load(name: str) -> Profile:
    """The profile a trace names; an unknown one falls back to the default and says so."""
    file = _FOLDER / f"{name}.toml"
    known = name.isidentifier() and file.is_file()
    said = tomllib.loads((file if known else _FOLDER / f"{DEFAULT}.toml").read_text("utf-8"))
    return Profile(name, known, dict(leaves(said)))
