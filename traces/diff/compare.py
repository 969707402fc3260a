"""Two traces held against each other: whether they say the same, and where the content parts first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lineage.traces.diff.aspects import BY_NAME, allowed
from lineage.traces.diff.facts import OF_TOPOLOGY, Facts, Places
from lineage.traces.diff.hashing import Bool, Int64, among, distinct
from lineage.traces.diff.match import match
from lineage.traces.diff.result import Diff, Difference, MissingStage, Setting, TraceSide, of_content
from lineage.traces.diff.side import Side
from lineage.traces.diff.tally import Tally
from lineage.traces.errors import TraceError

#: facts of one side that are held in memory together, where a step is not more
SLICE_FACTS = 1 << 20
#: by how much of their greatest value floats may differ to be called rounded
RTOL = 1e-5
_CONTEXT = ("weights", "sampling", "loss", "optim", "resident", "attrs")
# More pairs of rows than this are not looked at one by one: their context is said to differ.
_JUDGED = 20_000
_NO_STEP = -1


def diff(
    a: str | Path,
    b: str | Path,
    *,
    ignore: Iterable[str] = (),
    strict: bool = False,
    steps: tuple[int, int] | None = None,
    rtol: float = RTOL,
    limit: int = 3,
    threads: int = 2,
) -> Diff:
    """Compare two traces fact by fact.

    Args:
        a, b: files, run folders, globs or URLs; the first is what is expected.
        ignore: aspects, or groups of them, that do not count.
        strict: let where and in which pieces count too.
        steps: the first and the last step to compare; all when None.
        rtol: differences of floats, relative to the greatest value of their element, that are called rounding.
        limit: examples of each aspect.
        threads: to read with.

    Raises:
        TraceError: a trace cannot be read, holds several runs, or has no step to compare.
        UnknownAspect: ``ignore`` has a name that is none.
    """
    free = allowed(ignore, strict)
    with Side(a) as one, Side(b) as other, ThreadPoolExecutor(max_workers=max(1, threads)) as pool:
        return _Comparison((one, other), free, steps, rtol, limit, pool).run()


class _Comparison:
    def __init__(
        self,
        sides: tuple[Side, Side],
        free: frozenset[str],
        steps: tuple[int, int] | None,
        rtol: float,
        limit: int,
        pool: ThreadPoolExecutor,
    ) -> None:
        self.sides, self.free, self.rtol, self.pool = sides, free, rtol, pool
        self.places, self.tally = Places(), Tally(limit)
        torn = {step: 1 for side in sides for step in side.source.state.unseen}
        self.unseen = _within(torn, steps)
        # Of some steps only, what the trace lacks elsewhere is no matter.
        self.complete = not self.unseen and all(steps or side.source.state.complete for side in sides)
        self.steps_a, self.steps_b = (_within(side.facts, steps) - self.unseen for side in sides)
        if steps and not (self.steps_a | self.steps_b):
            raise TraceError(
                f"no step from {steps[0]} to {steps[1]} in {sides[0].source.path} or {sides[1].source.path}"
            )
        self.common = sorted(self.steps_a & self.steps_b)

    def run(self) -> Diff:
        shared = None  # whether a key of both sides has been seen
        for steps in self._slices():
            a, b = (side.read(steps, self.places, self.pool) for side in self.sides)
            if a is None or b is None:
                continue
            if not shared and (met := _share_keys(a, b)) is not None:
                if not met and not among(self.sides[0].keys(), self.sides[1].keys()).any():
                    return self._result(disjoint=True)
                shared = True
            self.tally.add(match(a, b, self.rtol, partial(self._rounded, a, b)), a, b, self.sides, self.places)
        return self._result()

    def _slices(self) -> Iterator[list[int]]:
        """The common steps, as many at a time as may be in memory together."""
        steps: list[int] = []
        held = 0
        for step in self.common:
            facts = max(side.facts[step] for side in self.sides)
            if steps and held + facts > SLICE_FACTS:
                yield steps
                steps, held = [], 0
            steps.append(step)
            held += facts
        if steps:
            yield steps

    def _rounded(self, a: Facts, b: Facts, rows_a: Int64, rows_b: Int64) -> Bool:
        """Of pairs of rows, those whose context differs by rounding only."""
        if not len(rows_a):
            return np.zeros(0, dtype=bool)
        pairs, which = np.unique(np.stack([rows_a, rows_b]), axis=1, return_inverse=True)
        if pairs.shape[1] > _JUDGED:
            return np.zeros(len(rows_a), dtype=bool)
        said_a, said_b = (
            side.values([(int(rid), 0) for rid in facts.rid[rows]], _CONTEXT)
            for side, facts, rows in zip(self.sides, (a, b), pairs, strict=True)
        )
        close = [
            _close(_context(said_a[int(a.rid[one]), 0]), _context(said_b[int(b.rid[other]), 0]), self.rtol)
            for one, other in pairs.T.tolist()
        ]
        return np.array(close, dtype=bool)[which.ravel()]

    def _result(self, disjoint: bool = False) -> Diff:
        a, b = self.sides
        counts = () if disjoint else self.tally.counts(self.places, self.free)
        listed = [] if disjoint else sorted(one for kind in self.tally.examples.values() for one in _plain(kind))
        return Diff(
            a=_described(a, [] if disjoint else self.common),
            b=_described(b, [] if disjoint else self.common),
            steps=_numbers([] if disjoint else self.common),
            only_a=_numbers(self.steps_a - self.steps_b),
            only_b=_numbers(self.steps_b - self.steps_a),
            unseen=_numbers(self.unseen),
            complete=bool(self.common) and self.complete,
            first=self._first(disjoint),
            counts=counts,
            differences=tuple(one for *_, one in listed),
            stages=tuple(self._stages()),
            settings=tuple(_settings(a, b)),
            disjoint=disjoint,
            allowed=tuple(name for name in BY_NAME if name in self.free),
        )

    def _first(self, disjoint: bool) -> Difference | None:
        """The first event that counts; one of content comes before one of form."""
        if disjoint:
            return None
        firsts = [
            (not of_content(aspect), *listed[0])
            for aspect, listed in self.tally.examples.items()
            if listed and aspect not in self.free
        ]
        return min(firsts, key=lambda one: (one[0], one[1], list(BY_NAME).index(one[2].aspect)))[2] if firsts else None

    def _stages(self) -> Iterator[MissingStage]:
        a, b = (side.stages for side in self.sides)
        for only, here, there in (("a", a, b), ("b", b, a)):
            where: dict[str, list[int]] = {}
            for step in self.common:
                for stage in sorted(here[step] - there[step]):
                    where.setdefault(stage, []).append(step)
            for stage, steps in where.items():
                yield MissingStage(stage, only, _numbers(steps))


def _within(facts: Mapping[int, int], steps: tuple[int, int] | None) -> set[int]:
    return {step for step in facts if steps is None or steps[0] <= step <= steps[1]}


def _numbers(steps: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(step for step in steps if step != _NO_STEP))


def _plain(listed: Sequence[tuple[tuple[float, ...], Difference]]) -> Iterator[tuple[Any, ...]]:
    order = list(BY_NAME)
    for number, (sort, one) in enumerate(listed):
        yield order.index(one.aspect), sort, number, one


def _described(side: Side, steps: Sequence[int]) -> TraceSide:
    source = side.source
    run_id = next((run.run_id for run in source.runs), "") or str(source.run.get("run_id") or "")
    return TraceSide(
        trace=str(source.path),
        run_id=run_id,
        rows=side.rows,
        facts=sum(side.facts.values()),
        compared=sum(side.facts[step] for step in steps),
        processes=len(side.processes),
        incomplete=source.state.sentence(),
    )


def _share_keys(a: Facts, b: Facts) -> bool | None:
    """Whether a trajectory key or a uid is on both sides; None where a side has none."""
    one, other = (distinct(side.key[side.keyed & (side.key != 0)]) for side in (a, b))
    return bool(among(one, other).any()) if len(one) and len(other) else None


def _settings(a: Side, b: Side) -> Iterator[Setting]:
    """Settings of the configurations, then the versions and the seed, that are not the same."""
    for one, other in ((a.source.config, b.source.config), (_of_run(a.source.run), _of_run(b.source.run))):
        left, right = (dict(_leaves(said)) for said in (one, other))
        for name in dict.fromkeys([*left, *right]):
            if left.get(name) != right.get(name):
                yield Setting(name, left.get(name), right.get(name))


def _of_run(said: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in said.items() if name not in ("run_id", "config_hash")}


def _leaves(said: Mapping[str, Any], head: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in said.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{head}{name}.")
        else:
            yield f"{head}{name}", value


def _context(said: Mapping[str, Any]) -> dict[str, Any]:
    """The context of a row without what is of place."""
    parts = {
        "weights": ("phase", "cache_epoch"),
        "resident": ("bytes",),
        "attrs": OF_TOPOLOGY,
    }
    return {
        name: {key: part for key, part in dict(value or {}).items() if key not in parts.get(name, ())}
        for name, value in said.items()
    }


def _close(a: Any, b: Any, rtol: float) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_close(a[name], b[name], rtol) for name in a)
    if a == b:
        return True
    try:
        one, other = (float(value) for value in (a, b))
    except (TypeError, ValueError):
        return False
    if any(isinstance(value, int | bool) for value in (a, b)) or all(_is_whole(value) for value in (a, b)):
        return False
    return abs(one - other) <= rtol * max(abs(one), abs(other))


def _is_whole(value: Any) -> bool:
    return isinstance(value, str) and value.lstrip("-").isdigit()
