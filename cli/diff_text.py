"""A comparison of two traces as text: the headline, what differs in which way, and examples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lineage.checks.formats.plain import plain, plural, shortened
from lineage.traces.diff import ASPECTS, Count, Diff, Difference, Event

_SHOWN_KEYS = 3
_SHOWN_PLACES = 6
_SHOWN_SETTINGS = 8
_WIDTH = 14
_SAYS = {aspect.name: aspect.says for aspect in ASPECTS}


def to_text(found: Diff, quiet: bool = False) -> str:
    """The comparison as plain text; what the traces say in it cannot break a line.

    Args:
        found: what was found.
        quiet: the headline only.
    """
    return "\n".join(map(plain, (*_headline(found), *(() if quiet else _rest(found)))))


def _headline(found: Diff) -> Iterator[str]:
    if found.disjoint:
        yield f"different: no trajectory key and no uid is in both traces{_seeds(found)}"
        return
    yield f"{_verdict(found)}: {_amount(found)}"
    if found.first is not None:
        yield from _parting(found.first, "first apart")
    for side, steps in (("A", found.only_a), ("B", found.only_b)):
        if steps:
            yield f"in {side} only: step {_steps(steps)}{', which does not count' if 'steps' in found.allowed else ''}"
    if found.equal and not found.complete:
        yield "incomplete: what is missing could differ (exit code 3)"


def _verdict(found: Diff) -> str:
    if not found.equal:
        return "different"
    listed = list(_by_aspect(found.counts)) + (["steps"] if found.only_a or found.only_b else [])
    if not listed:
        return "equal"
    return f"equal, but for {', '.join(listed)}, which {'does' if len(listed) == 1 else 'do'} not count"


def _amount(found: Diff) -> str:
    one, other = found.a.compared, found.b.compared
    facts = plural(one, "fact") if one == other else f"{one:,} facts in A, {other:,} in B"
    return f"{facts}, {plural(len(found.steps), 'step')} in both"


def _parting(one: Difference, head: str) -> Iterator[str]:
    step = "before any step" if one.global_steps is None else f"step {one.global_steps}"
    yield f"{head} at {step}, stage {one.stage}: {one.aspect} of {one.field}"
    yield f"  event     {one.op} {one.field} ({_events(one.a, one.b)})"
    if one.keys:
        more = f" and {one.alike - _SHOWN_KEYS} more" if one.alike > _SHOWN_KEYS else ""
        turn = f", turn {one.turn}" if one.turn is not None else ""
        yield f"  at        {', '.join(one.keys[:_SHOWN_KEYS])}{turn}{more}"
    yield f"  expected  {one.expected}"
    yield f"  actual    {one.actual}"


def _events(a: Event | None, b: Event | None) -> str:
    if a is None or b is None:
        side, event = ("A", a) if a is not None else ("B", b)
        return f"{side} only: {_event(event)}"
    if a.process == b.process:
        return _event(a) if a.seq == b.seq else f"{a.process}, seq {a.seq} in A, {b.seq} in B"
    return f"{_event(a)} in A, {_event(b)} in B"


def _event(event: Event | None) -> str:
    return "" if event is None else f"{event.process}, seq {event.seq}"


def _rest(found: Diff) -> Iterator[str]:
    yield ""
    for name, side in (("A", found.a), ("B", found.b)):
        run = f" (run {side.run_id})" if side.run_id else ""
        missing = f"; incomplete: {side.incomplete}" if side.incomplete else ""
        wrote = "1 process" if side.processes == 1 else f"{side.processes} processes"
        size = f"{plural(side.facts, 'fact')} in {plural(side.rows, 'row')} of {wrote}"
        yield f"{name}  {side.trace}{run}: {size}{missing}"
    if found.unseen:
        yield f"not compared, for they are not whole: step {_steps(found.unseen)}"
    for stage in found.stages:
        yield f"in {stage.only.upper()} only: stage {stage.stage} of step {_steps(stage.steps)}"
    yield from _settings(found)
    for title, counts in (("counts", True), ("does not count", False)):
        listed = [one for one in found.counts if one.counts is counts]
        if listed:
            yield ""
            yield title
            yield from _counts(listed)
    examples = [one for one in found.differences if one.aspect not in found.allowed and one is not found.first]
    for one in examples:
        yield ""
        yield from _parting(one, "also apart")


def _settings(found: Diff) -> Iterator[str]:
    for one in found.settings[:_SHOWN_SETTINGS]:
        yield f"setting {one.name}: {shortened(str(one.a), 60)} in A, {shortened(str(one.b), 60)} in B"
    if len(found.settings) > _SHOWN_SETTINGS:
        yield f"and {len(found.settings) - _SHOWN_SETTINGS} settings more (--json lists them)"


def _counts(counts: Sequence[Count]) -> Iterator[str]:
    for aspect, listed in _by_aspect(counts).items():
        yield f"  {aspect:<{_WIDTH}} {plural(sum(one.facts for one in listed), 'fact')}: {_SAYS[aspect]}"
        for one in listed[:_SHOWN_PLACES]:
            step = "" if one.first_step is None else f", from step {one.first_step}"
            only = ", ".join(
                f"{count:,} in {side} only" for side, count in (("A", one.only_a), ("B", one.only_b)) if count
            )
            where = f"{one.stage} {one.op} {one.field}: {one.facts:,}{step}"
            yield f"  {'':<{_WIDTH}}   {where}{f' ({only})' if only else ''}"
        if len(listed) > _SHOWN_PLACES:
            yield f"  {'':<{_WIDTH}}   and {len(listed) - _SHOWN_PLACES} places more"


def _by_aspect(counts: Sequence[Count]) -> dict[str, list[Count]]:
    found: dict[str, list[Count]] = {}
    for one in counts:
        found.setdefault(one.aspect, []).append(one)
    return found


def _seeds(found: Diff) -> str:
    seed = next((one for one in found.settings if one.name.split(".")[-1] == "seed"), None)
    return f" (seed {seed.a} in A, {seed.b} in B)" if seed else ": other seeds or data?"


def _steps(steps: Sequence[int]) -> str:
    """Steps as ranges: ``1..3, 5``."""
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    shown = ", ".join(str(first) if first == last else f"{first}..{last}" for first, last in ranges[:_SHOWN_PLACES])
    return shown + (" ..." if len(ranges) > _SHOWN_PLACES else "")
