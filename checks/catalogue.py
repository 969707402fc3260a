"""The invariants: one SQL file each, whose header says what it enforces, what it needs and what it costs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from lineage.errors import UserError
from lineage.schema import COLUMNS

if TYPE_CHECKING:
    from lineage.checks.own import Finding, Tables

FOLDER = Path(__file__).parent / "invariants"
_CODE = re.compile(r"([A-Z]{3,12})\d{3}")
_HEADER = re.compile(r"^-- (\w+):(.*)$")
SEVERITIES = ("error", "warning")
LOOKS = ("step", "run")
_REQUIRED = ("code", "name", "severity", "says", "needs", "fields", "examines", "subsumed_by", "source", "causes")
_OPTIONAL = ("stored", "looks", "reports", "faults", "backs_up")


class CatalogueError(UserError):
    """An invariant file that is not well formed, or a code nobody knows."""


Check = Callable[["Tables"], Iterable["Finding"]]


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
        stored: columns the file must have, though nothing need be said in them.
        looks: how far it looks: at a ``step`` with the steps before it that share its keys, or at the whole ``run``;
            what looks at the run may ask for no content of trajectories, only for events, groups and parameters.
        reports: public reports of what it would have caught, such as ``verl-project/verl#7207``.
        faults: names of faults it catches, as ``lineage faults`` lists them.
        backs_up: the code that catches what it catches, and why it stays; empty where only it catches something.
        sql: statements; the last returns ``rid, key, expected, actual, detail, severity``. Empty for one in Python.
        check: a function that yields its findings, in place of SQL; None for one in SQL.
        origin: the file or the distribution it comes from; empty for a built-in one.
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
    stored: tuple[str, ...] = ()
    looks: str = "step"
    reports: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    backs_up: str = ""
    sql: str = ""
    check: Check | None = None
    origin: str = ""

    @property
    def family(self) -> str:
        """The letters of the code."""
        return self.code.rstrip("0123456789")


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
    unknown = sorted(set(header) - {*_REQUIRED, *_OPTIONAL})
    if missing:
        raise CatalogueError(f"{where}: header lacks {', '.join(missing)} (lines such as: -- {missing[0]}: ...)")
    if unknown:
        raise CatalogueError(f"{where}: no header {unknown[0]!r}; known: {', '.join((*_REQUIRED, *_OPTIONAL))}")
    return validated(
        Invariant(
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
            stored=_names(header.get("stored", "")),
            looks=header.get("looks", LOOKS[0]),
            reports=_names(header.get("reports", "")),
            faults=_names(header.get("faults", "")),
            backs_up=header.get("backs_up", ""),
            sql=text,
        ),
        where,
    )


def validated(one: Invariant, where: str) -> Invariant:
    """The invariant, if it can be one.

    Raises:
        CatalogueError: its code, severity or a column it needs cannot be.
    """
    if not _CODE.fullmatch(one.code):
        raise CatalogueError(
            f"{where}: code {one.code!r}: expected 3 to 12 capital letters and 3 digits, as in TEAM001"
        )
    if one.severity not in SEVERITIES:
        raise CatalogueError(f"{where}: severity {one.severity!r}: expected error or warning")
    if one.looks not in LOOKS:
        raise CatalogueError(f"{where}: looks {one.looks!r}: expected {' or '.join(LOOKS)}")
    columns = [column.name for column in COLUMNS]
    for name in (*one.needs, *one.stored):
        if name not in columns:
            near = get_close_matches(name, columns, n=1)
            raise CatalogueError(
                f"{where}: needs {name}: no such column" + (f"; did you mean {near[0]}?" if near else "")
            )
    if bool(one.sql) == (one.check is not None):
        raise CatalogueError(f"{where}: an invariant has SQL or a function")
    return one


@cache
def catalogue() -> tuple[Invariant, ...]:
    """All invariants, by code."""
    return tuple(parse(file.read_text("utf-8"), file.name) for file in sorted(FOLDER.glob("*.sql")))


def available(folders: Sequence[Path] = ()) -> tuple[Invariant, ...]:
    """The catalogue, then a user's own: the ``.sql`` files of these folders, and what installed plugins bring.

    Raises:
        CatalogueError: a folder or file that cannot be read, or a code that is taken.
    """
    from lineage.checks.plugins import plugin_invariants

    files = [one for folder in {folder.resolve(): folder for folder in folders}.values() for one in _folder(folder)]
    own = sorted([*files, *plugin_invariants()], key=lambda one: one.code)
    known = {one.code: one for one in catalogue()}
    for one in own:
        taken = known.setdefault(one.code, one)
        if taken is not one:
            whose = taken.origin or f"lineage's own {taken.code}.sql"
            raise CatalogueError(f"{one.origin}: the code {one.code} is taken by {whose}; choose another")
    for one in own:
        for cause in one.subsumed_by:
            if cause not in known:
                raise CatalogueError(f"{one.origin}: subsumed_by: {_unknown(cause, tuple(known.values()))}")
    return tuple(known.values())


def _folder(folder: Path) -> Iterator[Invariant]:
    if not folder.is_dir():
        what = "is a file; give the folder it lies in" if folder.exists() else "no such folder"
        raise CatalogueError(f"checks {folder}: {what}")
    try:
        files = sorted(folder.glob("*.sql"))
        if not files:
            raise CatalogueError(f"checks {folder}: no .sql file in it")
        for file in files:
            yield replace(parse(file.read_text("utf-8-sig"), str(file)), origin=str(file))
    except OSError as error:
        raise CatalogueError(f"{error.filename or folder}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise CatalogueError(f"{file}: not UTF-8 (byte {error.start})") from error


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
    family = [one.code for one in found if one.family == code.upper()]
    raise CatalogueError(f"{code} is a family: name one of {', '.join(family)}" if family else _unknown(code, found))


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
    families = sorted({one.family for one in known})
    near = get_close_matches(name.upper(), [*(one.code for one in known), *families], n=1, cutoff=0.7)
    said = f"did you mean {near[0]}?" if near else f"families of codes: {', '.join(families)}"
    return f"no invariant {name!r}; {said}"


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
