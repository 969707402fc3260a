"""The invariants: one SQL file each, whose header says what it enforces, what it needs and what it costs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from lineage.errors import UserError

FOLDER = Path(__file__).parent / "invariants"
_CODE = re.compile(r"^[A-Z]{3}\d{3}$")
_HEADER = re.compile(r"^-- (\w+):(.*)$")
_REQUIRED = ("code", "name", "severity", "says", "needs", "fields", "examines", "subsumed_by", "source", "causes")


class CatalogueError(UserError):
    """An invariant file that is not well formed, or a code nobody knows."""


@dataclass(frozen=True)
class Invariant:
    """One contract of the step.

    Attributes:
        code: stable name, family and number.
        name: what holds, in a few words.
        severity: ``error`` or ``warning``: what a violation counts as, unless it says otherwise itself.
        says: the sentence it enforces.
        needs: columns without which it cannot see.
        fields: fields without which it cannot see.
        examines: query for the number of facts it looks at.
        subsumed_by: codes whose failure explains this one's.
        source: where the contract comes from.
        causes: what usually breaks it.
        sql: statements; the last returns ``rid, key, expected, actual, detail, severity``.
    """

    code: str
    name: str
    severity: str
    says: str
    needs: tuple[str, ...]
    fields: tuple[str, ...]
    examines: str
    subsumed_by: tuple[str, ...]
    source: str
    causes: str
    sql: str

    @property
    def family(self) -> str:
        """The three letters of the code."""
        return self.code[:3]


def parse(text: str, where: str) -> Invariant:
    """Read one invariant file.

    Raises:
        CatalogueError: a header is missing or unknown.
    """
    header: dict[str, str] = {}
    for line in text.splitlines():
        found = _HEADER.match(line)
        if found is None:
            break
        header[found[1]] = found[2].strip()
    missing = [name for name in _REQUIRED if name not in header]
    if missing or set(header) - set(_REQUIRED):
        wrong = missing or sorted(set(header) - set(_REQUIRED))
        raise CatalogueError(f"{where}: header {', '.join(wrong)} is missing or unknown")
    if not _CODE.match(header["code"]) or header["severity"] not in ("error", "warning"):
        raise CatalogueError(f"{where}: code must be like KEY001, severity error or warning")
    return Invariant(
        code=header["code"],
        name=header["name"],
        severity=header["severity"],
        says=header["says"],
        needs=_names(header["needs"]),
        fields=_names(header["fields"]),
        examines=header["examines"],
        subsumed_by=_names(header["subsumed_by"]),
        source=header["source"],
        causes=header["causes"],
        sql=text,
    )


@cache
def catalogue() -> tuple[Invariant, ...]:
    """All invariants, by code."""
    return tuple(parse(file.read_text("utf-8"), file.name) for file in sorted(FOLDER.glob("*.sql")))


def get(code: str) -> Invariant:
    """The invariant of this code, in any case.

    Raises:
        CatalogueError: nobody knows it; the nearest one is named.
    """
    for invariant in catalogue():
        if invariant.code == code.upper():
            return invariant
    raise CatalogueError(_unknown(code))


def select(chosen: Sequence[str] = (), ignored: Sequence[str] = ()) -> tuple[Invariant, ...]:
    """Invariants of these codes or families, less the ignored ones; all when none is chosen.

    Raises:
        CatalogueError: a name that is neither a code nor a family.
    """
    keep, drop = _expand(chosen), _expand(ignored)
    return tuple(one for one in catalogue() if (not chosen or one.code in keep) and one.code not in drop)


def _expand(names: Iterable[str]) -> set[str]:
    codes: set[str] = set()
    for name in names:
        for part in filter(None, (piece.strip().upper() for piece in name.split(","))):
            found = {one.code for one in catalogue() if part in (one.code, one.family)}
            if not found:
                raise CatalogueError(_unknown(part))
            codes |= found
    return codes


def _unknown(name: str) -> str:
    known = [one.code for one in catalogue()] + sorted({one.family for one in catalogue()})
    near = get_close_matches(name.upper(), known, n=1, cutoff=0.5)
    return f"no invariant {name!r}" + (f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}")


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
