"""What ``lineage selftest`` prints: how many of each kind, every offender by name, the matrix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from lineage.checks.formats.plain import plural
from lineage.cli.trials import Kind, Outcome, Result

_SAID = {Kind.FAULT: "fault", Kind.CLEAN: "clean run", Kind.LAW: "law"}
_ORDER: tuple[Result, ...] = tuple(Result)


def lines(done: Sequence[Outcome], seconds: float, jobs: int, *, each: bool, matrix: bool) -> Iterator[str]:
    """The result, line by line.

    Args:
        done: every outcome.
        seconds: time the whole took.
        jobs: worker processes.
        each: print the headline of every trial, as ``lineage check`` does.
        matrix: print which codes fail on which fault.
    """
    if each:
        for one in done:
            yield from _headline(one)
    if matrix:
        yield from matrix_lines(done)
    for kind in Kind:
        of_kind = [one for one in done if one.trial.kind is kind]
        if of_kind:
            yield f"{plural(len(of_kind), _SAID[kind])}: {_counted(of_kind)}"
    if not each:
        for result in _ORDER:
            for one in done:
                if one.result is result and not result.good:
                    yield f"  {result}: {offence(one)}"
    yield f"{_codes(done)} in {seconds:.0f} s with {plural(jobs, 'worker')}"


def interrupted(done: Sequence[Outcome], of: int) -> str:
    """How far a selftest came that was stopped, and what was found until then, in a line."""
    bad = [f"{one.trial.name} ({one.result})" for one in done if not one.result.good]
    found = f"; not as they should be: {', '.join(bad)}" if bad else ""
    return f"interrupted: {len(done)} of {plural(of, 'trial')} done{found}"


def offence(one: Outcome) -> str:
    """What is wrong with one outcome, in a line."""
    name = one.trial.name
    if one.error:
        return f"{name}: {one.error}"
    if one.wanted is not None:
        return f"{name}: wanted {one.wanted}; got {one.blamed or 'nothing'}"
    place = f"{one.blamed}: " if one.blamed else ""
    expected = "; ".join(line.strip() for line in one.headline if line.startswith(("  expected", "  actual")))
    said = f"{name}: {place}{expected or ', '.join(one.headline)}"
    return said + (f" ({' '.join(one.trial.overrides)})" if one.trial.overrides else "")


def matrix_lines(done: Iterable[Outcome]) -> Iterator[str]:
    """A line a fault, by the code it must be caught by: what else fails on it."""
    faults = [one for one in done if one.wanted is not None]
    width = max((len(one.trial.name) for one in faults), default=0)
    for one in faults:
        also = [code for code in one.failed if one.wanted is not None and code != one.wanted.code]
        led = one.wanted.code if one.wanted is not None else ""
        mark = led if led in one.failed else f"({led})"
        yield f"{mark:<8}  {one.trial.name:<{width}}  {'only this code' if not also else 'also ' + ' '.join(also)}"


def only_by(done: Iterable[Outcome]) -> dict[str, list[str]]:
    """The faults that one code alone catches, by that code: of one that only warns nothing failed."""
    found: dict[str, list[str]] = {}
    for one in done:
        if one.wanted is not None and one.result is Result.CAUGHT and set(one.failed) <= {one.wanted.code}:
            found.setdefault(one.wanted.code, []).append(one.trial.name)
    return found


def _headline(one: Outcome) -> Iterator[str]:
    yield from one.headline
    if one.result is Result.CAUGHT:
        yield f"{one.trial.name}: as the registry says, {one.wanted}"
    else:
        yield f"{one.result}: {offence(one)}"
    yield ""


def _counted(done: Sequence[Outcome]) -> str:
    counts = Counter(one.result for one in done)
    return ", ".join(f"{counts[result]} {result}" for result in _ORDER if counts[result])


def _codes(done: Sequence[Outcome]) -> str:
    """How many codes judged."""
    judged = {code for one in done for code in one.seen}
    return f"{plural(len(judged), 'code')}, {plural(len(done), 'trial')}"
