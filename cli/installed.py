"""What is installed, beside what the distribution asks for: read from its metadata, so no list is kept twice."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING

from lineage.errors import UserError, first_line

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DISTRIBUTION = "rl-lineage"
#: groups of entry points that bring code of ours, or others' code to us
PLUGIN_GROUPS = ("pytest11", "lineage")


class State(StrEnum):
    """What a package is, beside what is asked of it."""

    OK = "ok"
    MISSING = "missing"
    WRONG_VERSION = "wrong version"
    BROKEN = "broken"


@dataclass(frozen=True)
class Package:
    """One requirement and what is there.

    Attributes:
        name: of the distribution.
        wanted: versions asked for, empty for any.
        installed: version that is there, None without one.
        state: one beside the other.
        why: of a broken one, the first line of the error of its import.
    """

    name: str
    wanted: str
    installed: str | None
    state: State
    why: str = ""


@dataclass(frozen=True)
class Extra:
    """An extra of the distribution.

    Attributes:
        name: as in ``rl-lineage[name]``.
        packages: what it asks for, extras it is made of included.
        mend: the pip line that brings what is not there; empty when all is.
    """

    name: str
    packages: tuple[Package, ...]
    mend: str

    @property
    def wanting(self) -> tuple[Package, ...]:
        """Packages that are not as they should be."""
        return tuple(one for one in self.packages if one.state is not State.OK)


@dataclass(frozen=True)
class Plugin:
    """An entry point: its group and name, what it loads, and the distribution it comes from."""

    group: str
    name: str
    loads: str
    distribution: str


def base() -> tuple[Package, ...]:
    """The base dependencies, each imported to see that it can be."""
    return tuple(_imported(_package(one)) for one in _requirements(""))


def extras() -> tuple[Extra, ...]:
    """The extras; their packages are looked up and not imported, for torch alone takes seconds."""
    found = metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    return tuple(_extra(name) for name in found)


def plugins() -> tuple[Plugin, ...]:
    """Entry points of ours for pytest, and anybody's for lineage."""
    return tuple(
        Plugin(group, one.name, one.value, one.dist.name if one.dist else "")
        for group in PLUGIN_GROUPS
        for one in metadata.entry_points(group=group)
        if group == "lineage" or one.value.startswith("lineage.")
    )


def torch_build() -> str:
    """Which torch is there, as its own version file says: ``2.11.0, CPU``, ``2.11.0, CUDA 12.8``; empty without one."""
    try:
        found = metadata.distribution("torch")
    except metadata.PackageNotFoundError:
        return ""
    said = _constants(Path(str(found.locate_file("torch/version.py"))))
    build = next((f"{name} {said[key]}" for key, name in _BUILDS.items() if said.get(key)), "CPU")
    return f"{found.version}, {build}"


_BUILDS = {"cuda": "CUDA", "hip": "ROCm", "xpu": "XPU"}


def _constants(file: Path) -> dict[str, object]:
    """Names a module gives a literal value to, without running it."""
    try:
        tree = ast.parse(file.read_text("utf-8"))
    except (OSError, SyntaxError, ValueError):
        return {}
    found: dict[str, object] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant):
            found |= {target.id: value.value for target in targets if isinstance(target, ast.Name)}
    return found


def _extra(name: str) -> Extra:
    packages = tuple({one.name: one for one in map(_package, _requirements(name))}.values())
    sound = all(one.state is State.OK for one in packages)
    return Extra(name, packages, "" if sound else f'pip install "{DISTRIBUTION}[{name}]"')


def _requirements(extra: str) -> Iterator[Requirement]:
    """Requirements that this extra adds (the base's for an empty name), on this machine."""
    from packaging.requirements import Requirement

    for line in _lines():
        one = Requirement(line)
        adds = one.marker is None if not extra else one.marker is not None
        if one.marker is not None:
            holds = one.marker.evaluate({"extra": extra})
            adds = holds if not extra else holds and not one.marker.evaluate({"extra": ""})
        if not adds:
            continue
        if one.name == DISTRIBUTION:
            for part in sorted(one.extras):
                yield from _requirements(part)
        else:
            yield one


def _lines() -> list[str]:
    try:
        return metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError as error:
        raise UserError(f"{DISTRIBUTION} is not installed in this Python; from a clone: pip install -e .") from error


def _package(one: Requirement) -> Package:
    wanted = str(one.specifier)
    try:
        version = metadata.version(one.name)
    except metadata.PackageNotFoundError:
        return Package(one.name, wanted, None, State.MISSING)
    fits = one.specifier.contains(version, prereleases=True)
    return Package(one.name, wanted, version, State.OK if fits else State.WRONG_VERSION)


def _imported(one: Package) -> Package:
    if one.state is State.MISSING:
        return one
    try:
        import_module(one.name.replace("-", "_"))
    except Exception as error:  # a half-installed package may raise anything
        why = first_line(error)
        return Package(one.name, one.wanted, one.installed, State.BROKEN, why)
    return one
