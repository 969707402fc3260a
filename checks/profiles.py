"""What a given trainer legitimately does: its formulas and epsilons. A profile never loosens a code."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parent / "profiles"
DEFAULT = "lineage"


@dataclass(frozen=True)
class Profile:
    """One trainer's conventions.

    Attributes:
        name: ``lineage``, ``verl`` or ``trl``.
        known: false when the trace names a profile nobody wrote; the default's conventions are then used.
        metric_relative: relative difference at which a metric recomputed from the rows is another number.
        metric_absolute: absolute difference, likewise.
    """

    name: str
    known: bool
    metric_relative: float
    metric_absolute: float


def load(name: str) -> Profile:
    """The profile a trace names; an unknown one falls back to the default and says so."""
    file = _FOLDER / f"{name}.toml"
    known = name.isidentifier() and file.is_file()
    said = tomllib.loads((file if known else _FOLDER / f"{DEFAULT}.toml").read_text("utf-8"))
    metrics = said["metrics"]
    return Profile(name, known, float(metrics["relative"]), float(metrics["absolute"]))
