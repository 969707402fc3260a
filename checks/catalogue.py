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


def available(folders: Sequence[Path] = ()) -> tuple[Invariant, ...]:
    """The catalogue, and the user's own invariants in these folders."""
    return catalogue()


def get(code: str, known: Sequence[Invariant] | None = None) -> Invariant:
    """The invariant of this code, in any case.

    Args:
        code: such as ``KEY001``.
        known: where to look; the catalogue when None.

    Raises:
        CatalogueError: nobody knows it; the nearest one is named.
    """
    found = catalogue() if known is None else known
    for invariant in found:
        if invariant.code == code.upper():
            return invariant
    raise CatalogueError(_unknown(code, found))


def select(
    chosen: Sequence[str] = (), ignored: Sequence[str] = (), known: Sequence[Invariant] | None = None
) -> tuple[Invariant, ...]:
    """Invariants of these codes or families, less the ignored ones; all when none is chosen.

    Args:
        chosen: codes or families, in any case.
        ignored: likewise.
        known: where to choose from; the catalogue when None.

    Raises:
        CatalogueError: a name that is neither a code nor a family.
    """
    found = catalogue() if known is None else tuple(known)
    keep, drop = _expand(chosen, found), _expand(ignored, found)
    return tuple(one for one in found if (not chosen or one.code in keep) and one.code not in drop)


def _expand(names: Iterable[str], known: Sequence[Invariant]) -> set[str]:
    codes: set[str] = set()
    for name in names:
        found = {one.code for one in known if name.upper() in (one.code, one.family)}
        if not found:
            raise CatalogueError(_unknown(name, known))
        codes |= found
    return codes


def _unknown(name: str, known: Sequence[Invariant]) -> str:
    names = [one.code for one in known] + sorted({one.family for one in known})
    near = get_close_matches(name.upper(), names, n=1, cutoff=0.7)
    return f"no invariant {name!r}" + (f"; did you mean {near[0]}?" if near else f"; known: {', '.join(names)}")


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
