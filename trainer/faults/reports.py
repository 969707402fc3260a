"""The public reports the faults stand for, by the kind of contract they broke."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent / "reports"


@dataclass(frozen=True)
class PublicReport:
    """One public report of a training step that did not do what it said.

    Attributes:
        id: name of the report here.
        family: kind of contract it broke; the name of its file.
        framework: whose trainer it was.
        reference: the issue, pull request or commit.
        silent: nothing crashed.
        symptom: what was seen.
        cause: what was wrong.
        without: why no fault stands for it; empty where one does.
    """

    id: str
    family: str
    framework: str
    reference: str
    silent: bool
    symptom: str
    cause: str
    without: str = ""


@cache
def public_reports() -> dict[str, PublicReport]:
    """Every report by id."""
    return {
        name: PublicReport(name, file.stem, **said)
        for file in sorted(_FOLDER.glob("*.toml"))
        for name, said in tomllib.loads(file.read_text("utf-8")).items()
    }
