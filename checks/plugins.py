"""Invariants written in Python, from other distributions: an entry point of group ``lineage`` and one hook.

A distribution names a module in its entry points; the module has a function ``lineage_invariants``, marked with
:data:`hookimpl`, that returns invariants made with :func:`invariant`. Nothing is imported before traces are checked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points

import pluggy

from lineage.checks.catalogue import CatalogueError, Check, Invariant, validated
from lineage.errors import first_line

GROUP = "lineage"
#: environment variable that leaves them all out: a broken one need not stop a gate
OFF = "LINEAGE_NO_PLUGINS"

hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)


class PluginError(CatalogueError):
    """A distribution whose invariants cannot be used."""


class Hooks:
    """What a plugin may say."""

    @hookspec
    def lineage_invariants(self) -> Iterable[Invariant]:  # type: ignore[empty-body]
        """The invariants of this distribution."""


def invariant(
    *,
    code: str,
    name: str,
    says: str,
    examines: str,
    severity: str = "error",
    needs: Iterable[str] = (),
    fields: Iterable[str] = (),
    subsumed_by: Iterable[str] = (),
    source: str = "",
    causes: str = "",
) -> Callable[[Check], Invariant]:
    """Make an invariant of a function that looks at the tables and yields findings.

    Args:
        code: three to twelve capital letters and three digits.
        name: what holds, in a few words.
        says: the sentence it enforces.
        examines: query for the number of facts it looks at; 0 makes it vacuous.
        severity: ``error`` or ``warning``.
        needs: columns without which it cannot see.
        fields: fields without which it cannot see.
        subsumed_by: codes whose failure explains this one's.
        source: where the contract comes from.
        causes: what usually breaks it.

    Raises:
        CatalogueError: a code, severity or column that cannot be.
    """

    def made(check: Check) -> Invariant:
        return validated(
            Invariant(
                code=code,
                name=name,
                severity=severity,
                says=says,
                needs=tuple(needs),
                fields=tuple(fields),
                examines=examines,
                subsumed_by=tuple(subsumed_by),
                source=source,
                causes=causes,
                check=check,
            ),
            f"{check.__module__}.{check.__qualname__}",
        )

    return made


def plugin_invariants() -> tuple[Invariant, ...]:
    """Invariants of the distributions installed here; none where ``LINEAGE_NO_PLUGINS`` is set.

    Raises:
        PluginError: a distribution's entry point cannot be imported, or does not return invariants.
    """
    return () if os.environ.get(OFF, "0") not in ("", "0") else _installed()


@cache
def _installed() -> tuple[Invariant, ...]:
    return tuple(one for entry in entry_points(group=GROUP) for one in _of(entry))


def _of(entry: EntryPoint) -> Iterator[Invariant]:
    distribution = entry.dist.name if entry.dist is not None else entry.name
    where = f"{distribution} (entry point {entry.name} = {entry.value})"
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(Hooks)
    try:
        manager.register(entry.load(), entry.name)
        manager.check_pending()
        if not manager.hook.lineage_invariants.get_hookimpls():
            raise TypeError("no function lineage_invariants marked with lineage.checks.hookimpl")
        given = [one for listed in manager.hook.lineage_invariants() for one in listed]
        wrong = next((one for one in given if not isinstance(one, Invariant)), None)
        if wrong is not None:
            raise TypeError(f"it gave a {type(wrong).__name__}, an Invariant is wanted: see lineage.checks.invariant")
        yield from (validated(replace(one, origin=distribution), distribution) for one in given)
    except (Exception, SystemExit) as error:
        mend = f"mend it, pip uninstall {distribution}, or set {OFF}=1"
        raise PluginError(f"{where}: {type(error).__name__}: {first_line(error)}; {mend}") from error
