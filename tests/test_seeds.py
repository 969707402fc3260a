"""docs/seeds.md: each statement of the source documents has code, stage and test, or a reason; all it names exists."""

from __future__ import annotations

import functools
import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lineage.checks.catalogue import catalogue
from lineage.vocabulary import STAGES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "seeds.md"
EVIDENCE = {"source fact", "source fact, tested", "interpretation", "interpretation, tested"}
REASON = "not here: "


@dataclass(frozen=True)
class Statement:
    """One row of the page; ``-`` is empty."""

    text: str
    evidence: str
    code: tuple[str, ...]
    stage: str
    codes: tuple[str, ...]
    tests: tuple[str, ...]
    verl: str


@functools.cache
def statements() -> tuple[Statement, ...]:
    """The rows of every table of the page."""
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return tuple(
        Statement(text, evidence, _named(code), stage, _named(codes), _named(tests), verl)
        for text, evidence, code, stage, codes, tests, verl in rows
        if text not in ("statement", "---")
    )


def _named(cell: str) -> tuple[str, ...]:
    return tuple(name.strip("` ") for name in cell.split(",") if name.strip() != "-")


@functools.cache
def exists(name: str) -> bool:
    """Whether a dotted name under ``lineage`` is a module, an object of one, or a field of a class."""
    parts = name.removeprefix("lineage.").split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(["lineage", *parts[:length]]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if not hasattr(found, part):
                return part in getattr(found, "__dataclass_fields__", {})
            found = getattr(found, part)
        return True
    return False


@functools.cache
def defined_in(path: str) -> frozenset[str]:
    """Names of the tests of a file, read and not run."""
    text = (ROOT / "tests" / path).read_text("utf-8")
    return frozenset(re.findall(r"^ *(?:async )?def (test_\w+)\(", text, flags=re.MULTILINE))


def test_every_statement_is_kept_or_has_its_reason():
    """A row has code, stage and test, or says why this trainer has none; ``tested`` is said where a test is named."""
    assert len(statements()) > 100
    for row in statements():
        assert row.evidence in EVIDENCE, row
        assert row.stage in STAGES, row
        assert row.evidence.endswith("tested") == bool(row.tests and row.code), row
        assert row.verl.startswith(REASON) or (row.code and row.tests), row
        assert len(row.verl.removeprefix(REASON)) > 3, row


def test_every_code_place_exists():
    """Modules, classes and functions that the page names can be imported, and a wrong name would be found."""
    assert [name for row in statements() for name in row.code if not exists(name)] == []
    assert not exists("trainer.grpo.PPOTrainerAsync")
    assert not exists("trainer.no_such_module")


def test_every_test_exists():
    """Each test named is defined in its file."""
    named = {name for row in statements() for name in row.tests}
    pairs = [re.fullmatch(r"([\w/]+\.py)::(test_\w+)", name) for name in named]
    assert all(pairs)
    assert [pair[0] for pair in pairs if pair and pair[2] not in defined_in(pair[1])] == []


def test_every_invariant_is_in_the_catalogue():
    """The codes named exist, and every code that comes from the field invariants guards some statement."""
    named = {code for row in statements() for code in row.codes}
    assert named <= {one.code for one in catalogue()}
    assert {one.code for one in catalogue() if re.search(r"\bS\d+\b", one.source)} <= named


def test_the_field_invariants_are_all_there():
    """S1 to S11, the names the catalogue gives as sources, are rows."""
    listed = [match[1] for row in statements() if (match := re.match(r"(S\d+): ", row.text))]
    assert listed == [f"S{number}" for number in range(1, 12)]


def test_no_statement_is_there_twice():
    """Two rows of one wording would be one statement counted twice."""
    texts = [row.text for row in statements()]
    assert len(set(texts)) == len(texts)
