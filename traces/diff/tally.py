"""Differences counted, and the first of each kind put into words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lineage.traces.diff.aspects import ASPECTS, BY_NAME, CARRIED
from lineage.traces.diff.facts import Facts, Places
from lineage.traces.diff.hashing import Int64
from lineage.traces.diff.match import NONE, Found, Matching
from lineage.traces.diff.result import Count, Difference, Event
from lineage.traces.diff.side import Side

#: keys of one event that are named
KEYS = 20
_CONTEXT = BY_NAME["context"].columns
_FLOATS = ("sum_in", "min_in", "max_in")
# What is looked at to say how two facts differ, where it is not the aspect's own columns.
_SAID = {
    "fingerprint": ("fingerprint", "marks", *_FLOATS),
    "weights": ("fingerprint",),
    "rounding": ("fingerprint", *_FLOATS, *_CONTEXT),
    "comparison": (*BY_NAME["comparison"].columns, *_FLOATS),
    "counters": ("slot", "source_index", "weights", *CARRIED),
    "rows": ("n", "asked_n", "nbytes", "micro_batch", "shape", "resident"),
    "topology": ("topology", "attrs"),
    "micro_batch": ("loss", "attrs"),
    "timing": ("sum",),
}
_ASKED = tuple(
    dict.fromkeys(
        (
            "process", "seq", "key", "turn", "missing",
            *(name for aspect in ASPECTS for name in _SAID.get(aspect.name, aspect.columns)),
        )
    )
)  # fmt: skip


class Tally:
    """Counts over all slices, and the first examples of each aspect.

    Args:
        limit: examples of an aspect.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._counts: dict[tuple[str, int], list[int]] = {}  # facts, only a, only b, first step
        self.examples: dict[str, list[tuple[tuple[float, ...], Difference]]] = {}

    def add(self, found: Matching, a: Facts, b: Facts, sides: tuple[Side, Side], places: Places) -> None:
        """Count what one slice of steps has; slices come in the order of their steps."""
        fresh: list[tuple[tuple[float, ...], _Pending]] = []
        for one in found.found:
            step, place, order, at = _where(one, a, b, found.rows)
            self._count(one, step, place)
            wanted = self._limit - len(self.examples.get(one.aspect, ()))
            if wanted > 0:
                first = np.lexsort((at, order, step))
                for which in _distinct(first, order, wanted):
                    sort: tuple[float, ...] = (float(step[which]), float(order[which]), float(at[which]))
                    fresh.append((sort, _Pending(one, which, first[order[first] == order[which]])))
        said = [
            _said(side, facts, [pending.of(number) for _, pending in fresh])
            for number, (side, facts) in enumerate(zip(sides, (a, b), strict=True))
        ]
        for sort, pending in fresh:
            example = _example(pending, (a, b), said, places)
            self.examples.setdefault(pending.one.aspect, []).append((sort, example))
        for aspect, listed in self.examples.items():  # a kind may be found in two ways
            self.examples[aspect] = sorted(listed, key=lambda one: one[0])[: self._limit]

    def counts(self, places: Places, allowed: frozenset[str]) -> tuple[Count, ...]:
        """All counts, the aspects in their order."""
        names = places.names()
        order = {aspect.name: number for number, aspect in enumerate(ASPECTS)}
        listed = [
            Count(
                aspect,
                BY_NAME[aspect].group,
                aspect not in allowed,
                *names[place][:3],
                facts=facts,
                only_a=only_a,
                only_b=only_b,
                first_step=step if step >= 0 else None,
            )
            for (aspect, place), (facts, only_a, only_b, step) in self._counts.items()
        ]
        listed.sort(key=lambda one: (order[one.aspect], one.first_step or 0, -one.facts, one.stage, one.op, one.field))
        merged: dict[tuple[str, ...], Count] = {}
        for one in listed:  # two entities of one name are one line
            key = (one.aspect, one.stage, one.op, one.field)
            merged[key] = _plus(merged[key], one) if key in merged else one
        return tuple(merged.values())

    def _count(self, one: Found, step: Int64, place: Int64) -> None:
        numbers, which = np.unique(place, return_inverse=True)
        for number, place_number in enumerate(numbers.tolist()):
            inside = which == number
            facts = int(one.count[inside].sum())
            only_a, only_b = int((one.b[inside] == NONE).sum()), int((one.a[inside] == NONE).sum())
            first = int(step[inside].min())
            known = self._counts.setdefault((one.aspect, place_number), [0, 0, 0, first])
            known[0] += facts
            known[1] += only_a
            known[2] += only_b
            known[3] = min(known[3], first)


def _plus(one: Count, other: Count) -> Count:
    steps = [step for step in (one.first_step, other.first_step) if step is not None]
    sums = (one.facts + other.facts, one.only_a + other.only_a, one.only_b + other.only_b)
    return Count(one.aspect, one.group, one.counts, one.stage, one.op, one.field, *sums, min(steps, default=None))


def _where(one: Found, a: Facts, b: Facts, rows: Int64) -> tuple[Int64, Int64, np.ndarray, Int64]:
    """Step, place, order of the event and element of each; an event of ``b`` alone stands behind the last in common."""
    there = one.a != NONE
    row_a, row_b = a.row[one.a], b.row[one.b]
    step = np.where(there, a.step[row_a], b.step[row_b])
    place = np.where(there, a.place[row_a], b.place[row_b])
    at = np.where(there, a.at[one.a], b.at[one.b])
    order = row_a.astype(np.float64)
    if not there.all():
        of_a, of_b = rows
        last = np.searchsorted(of_b, row_b, side="right") - 1
        behind = np.where(last >= 0, of_a[np.maximum(last, 0)] if len(of_a) else NONE, NONE)
        # between two events of a, in the order of b
        order = np.where(there, order, behind + 0.5 + row_b / (4.0 * max(1, len(b.rid))))
    return step, place, order, at


def _distinct(first: Int64, order: np.ndarray, wanted: int) -> Iterator[int]:
    """The first difference of each of the first events."""
    _, at = np.unique(order[first], return_index=True)
    for which in np.sort(at)[:wanted].tolist():
        yield int(first[which])


@dataclass(frozen=True)
class _Pending:
    """A difference to be put into words: one of those found, and those of its event that differ alike."""

    one: Found
    which: int
    alike: Int64

    def of(self, side: int) -> list[int]:
        """Numbers of the facts on a side: its own first, then those whose keys are named."""
        numbers = self.one.b if side else self.one.a
        wanted = numbers[[self.which, *self.alike[:KEYS].tolist()]]
        return [number for number in wanted.tolist() if number != NONE]


def _said(side: Side, facts: Facts, wanted: Sequence[Sequence[int]]) -> dict[int, dict[str, Any]]:
    """What some facts say, by their numbers."""
    places = {
        number: (int(facts.rid[facts.row[number]]), int(facts.at[number])) for numbers in wanted for number in numbers
    }
    found = side.values(places.values(), _ASKED) if places else {}
    said = {}
    for number, place in places.items():
        values = dict(found[place])
        if place[1] < 0:  # asked for and not returned
            values["key"] = (values.get("missing") or [])[-1 - place[1]]
        said[number] = values
    return said


def _example(
    pending: _Pending, sides: tuple[Facts, Facts], said: Sequence[dict[int, dict[str, Any]]], places: Places
) -> Difference:
    one, which = pending.one, pending.which
    side = 0 if one.a[which] != NONE else 1
    facts, number = sides[side], int((one.a, one.b)[side][which])
    values = said[0].get(int(one.a[which])), said[1].get(int(one.b[which]))
    row = int(facts.row[number])
    stage, op, field, entity = places.names()[int(facts.place[row])]
    step = int(facts.step[row])
    columns = _SAID.get(one.aspect, BY_NAME[one.aspect].columns)
    expected, actual = _words(one.aspect, *values, columns, bool(facts.at[number] < 0))
    keys = [said[side][alike].get("key") for alike in pending.of(side)]
    return Difference(
        aspect=one.aspect,
        global_steps=step if step >= 0 else None,
        stage=stage,
        op=op,
        field=field,
        entity=entity,
        key=said[side][number].get("key"),
        turn=said[side][number].get("turn"),
        a=_event(values[0]),
        b=_event(values[1]),
        expected=expected,
        actual=actual,
        alike=int(one.count[pending.alike].sum()),
        keys=tuple(dict.fromkeys(key for key in keys if key is not None)),
    )


def _event(said: Mapping[str, Any] | None) -> Event | None:
    return None if said is None else Event(str(said.get("process") or ""), said.get("seq"))


def _words(
    aspect: str, a: Mapping[str, Any] | None, b: Mapping[str, Any] | None, columns: Sequence[str], asked: bool
) -> tuple[str, str]:
    """What either side says, of the columns in which they differ."""
    if a is None or b is None:
        here = {"copies": "once more", "missing": "asked for and not returned" if asked else "a fact"}.get(
            aspect, "a fact"
        )
        return (here, "none") if b is None else ("none", here)
    pairs = [
        pair
        for name in columns
        for pair in _parts(name, a.get(name), b.get(name))
        if pair[1] != pair[2] and (aspect != "context" or pair[0] not in ("weights.cache_epoch", "resident.bytes"))
    ]
    if not pairs:
        return "another hash", "another hash"
    return tuple(", ".join(f"{part[0]} {part[side]}" for part in pairs[:6]) for side in (1, 2))  # type: ignore[return-value]


def _parts(name: str, a: Any, b: Any) -> Iterator[tuple[str, str, str]]:
    """The leaves of a value on both sides, as text."""
    if isinstance(a, dict) or isinstance(b, dict):
        for part in dict.fromkeys([*(a or {}), *(b or {})]):
            yield from _parts(f"{name}.{part}", (a or {}).get(part), (b or {}).get(part))
    elif name == "attrs":
        yield from _parts(name, dict(a or ()), dict(b or ()))
    elif "fingerprint" in name:
        yield name, *(_none(None if value is None else f"{value:016x}") for value in (a, b))  # type: ignore[misc]
    elif name == "marks":
        yield name, *(_none(value and f"at {[mark['at'] for mark in value]}") for value in (a, b))  # type: ignore[misc]
    else:
        yield name, _none(a), _none(b)


def _none(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.9g}" if math.isfinite(value) else str(value)
    return "none" if value is None else str(value)
