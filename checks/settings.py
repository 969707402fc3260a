"""What a project writes down about its gate: ``[tool.lineage]`` in ``pyproject.toml``, or ``lineage.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lineage.checks.formats import PRINTED, split_output
from lineage.checks.policy import Match, Policy
from lineage.errors import UserError

PROJECT, OWN = "pyproject.toml", "lineage.toml"


class SettingsError(UserError):
    """A settings file, or an option, that cannot be meant."""


@dataclass(frozen=True)
class Settings:
    """Which checks are run, what they let through, and where the report goes.

    Attributes:
        select: codes or families to run; all when empty.
        ignore: codes or families to leave out.
        policy: what the exit code lets through.
        baseline: file of known violations.
        baseline_match: how the next ``--update-baseline`` recognises them.
        checks: folders of the user's own invariants.
        format: formats of the report.
        output: where they go, ``FILE`` or ``FORMAT=FILE``.
        source: the file they come from; None without one.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    policy: Policy = field(default_factory=Policy)
    baseline: Path | None = None
    baseline_match: Match = Match.KEY
    checks: tuple[Path, ...] = ()
    format: tuple[str, ...] = ()
    output: tuple[str, ...] = ()
    source: Path | None = None


def find(start: Path) -> Path | None:
    """The settings file that holds for a folder: the nearest one, upwards; a ``pyproject.toml`` that says nothing of
    lineage is passed by.

    Raises:
        SettingsError: a file on the way cannot be read as TOML.
    """
    for folder in (start.resolve(), *start.resolve().parents):
        if (folder / OWN).is_file():
            return folder / OWN
        if (folder / PROJECT).is_file() and _table(folder / PROJECT) is not None:
            return folder / PROJECT
    return None


def load(path: Path) -> Settings:
    """Read a settings file; paths in it are seen from its own folder.

    Raises:
        SettingsError: it is not TOML, or says something nobody knows.
    """
    said = _table(path)
    if said is None:
        raise SettingsError(f"{path}: no [tool.lineage] in it")
    settings = Settings(source=path)
    for name, value in said.items():
        if name not in SETTINGS:
            near = get_close_matches(name, SETTINGS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(SETTINGS)}"
            hint = "no header is wanted here" if name == "tool" else hint
            raise SettingsError(f"{path}: no setting {name!r}; {hint}")
        try:
            settings = SETTINGS[name](settings, value, path.parent)
        except (ValueError, TypeError, AttributeError) as error:
            raise SettingsError(f"{path}: {name} = {value!r}: {error}") from error
    return settings


def counts(said: Any, default: int | None = None) -> dict[str, int]:
    """``{"KEY001": 5}``, ``["KEY001=5", "LEN002,LEN003"]`` or ``"KEY001"`` as counts by code.

    Args:
        said: a table, a list or a string.
        default: the count of a code without one; None means it must have one.

    Raises:
        ValueError: a count that is none.
    """
    if isinstance(said, Mapping):
        return {str(code).upper(): _count(str(code), number) for code, number in said.items()}
    found: dict[str, int] = {}
    for part in names(said):
        code, equals, number = part.partition("=")
        if not equals and default is None:
            raise ValueError(f"{part}: say how many, as in {part}=3")
        found[code.strip().upper()] = _count(code, number) if equals else int(default or 0)
    return found


def names(said: Any) -> tuple[str, ...]:
    """A list of strings, each maybe several between commas, as one flat list."""
    return tuple(part for one in _strings(said) for piece in one.split(",") if (part := piece.strip()))


def _strings(said: Any) -> list[str]:
    listed = [said] if isinstance(said, str) else list(said) if isinstance(said, Iterable) else [said]
    if not all(isinstance(one, str) for one in listed):
        raise ValueError("expected a string or a list of strings")
    return listed


def _count(code: str, said: Any) -> int:
    if isinstance(said, bool) or not str(said).strip().isdigit():
        raise ValueError(f"{code}={said}: expected a number of 0 or more")
    return int(said)


def _flag(said: Any) -> bool:
    if not isinstance(said, bool):
        raise ValueError("expected true or false")
    return said


def _match(said: Any) -> Match:
    if said not in tuple(Match):
        raise ValueError(f"expected one of {', '.join(Match)}")
    return Match(said)


def _path(folder: Path, said: Any) -> Path:
    if not isinstance(said, str):
        raise ValueError("expected a path")
    return folder / said


def _output(folder: Path, said: str) -> str:
    """``FORMAT=FILE`` or ``FILE`` with the file seen from the settings' folder; ``-`` stays what is printed."""
    form, file = split_output(said)
    place = file if file == PRINTED else str(folder / file)
    return f"{form}={place}" if form else place


def _policy(settings: Settings, **changed: Any) -> Settings:
    return replace(settings, policy=replace(settings.policy, **changed))


#: every setting, with how it is read
SETTINGS: dict[str, Callable[[Settings, Any, Path], Settings]] = {
    "select": lambda settings, said, _: replace(settings, select=names(said)),
    "ignore": lambda settings, said, _: replace(settings, ignore=names(said)),
    "require": lambda settings, said, _: _policy(settings, require=counts(said, default=1)),
    "max-violations": lambda settings, said, _: _policy(settings, max_violations=counts(said)),
    "max-warnings": lambda settings, said, _: _policy(settings, max_warnings=_count("max-warnings", said)),
    "allow-incomplete": lambda settings, said, _: _policy(settings, allow_incomplete=_flag(said)),
    "exit-zero": lambda settings, said, _: _policy(settings, exit_zero=_flag(said)),
    "baseline": lambda settings, said, folder: replace(settings, baseline=_path(folder, said)),
    "baseline-match": lambda settings, said, _: replace(settings, baseline_match=_match(said)),
    "checks": lambda settings, said, folder: replace(settings, checks=tuple(folder / one for one in _strings(said))),
    "format": lambda settings, said, _: replace(settings, format=names(said)),
    "output": lambda settings, said, folder: replace(
        settings, output=tuple(_output(folder, one) for one in _strings(said))
    ),
}


def _table(path: Path) -> dict[str, Any] | None:
    """The settings a file holds, None when it is a project file that has none."""
    try:
        said = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: cannot read the settings: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not TOML: {error}") from error
    if path.name != PROJECT:
        return said
    tool = said.get("tool", {})
    table = tool.get("lineage") if isinstance(tool, dict) else None
    return table if isinstance(table, dict) else None
