"""Runs invariants over one trace: the workbench once, then every invariant, then the headline."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import duckdb
import pyarrow as pa

from lineage.checks import slices
from lineage.checks.blame import headline
from lineage.checks.catalogue import Invariant
from lineage.checks.desk import LISTED, Desk, ask_all
from lineage.checks.digest import Digest
from lineage.checks.own import accuse
from lineage.checks.own import examined as own_examined
from lineage.checks.profiles import load
from lineage.checks.report import Report
from lineage.checks.slices import Index, facts_of
from lineage.checks.verdict import Kind, Site, Verdict, Violation
from lineage.checks.workbench import Workbench
from lineage.errors import first_line
from lineage.traces import Trace, TraceError
from lineage.traces.errors import reading
from lineage.traces.interrupts import interrupted, interruptible
from lineage.traces.torn import lacks

Answer = TypeVar("Answer")
_SHOWN = 3  # files of one profile, where they must be told apart


def judge(trace: Trace, invariants: Sequence[Invariant], threads: int | None = None) -> Report:
    """What these invariants say of a trace.

    Raises:
        TraceError: it cannot be read, or its runs follow different profiles.
    """
    with interruptible(trace.connection), reading(trace.path):
        return _judged(trace, invariants, threads or min(4, os.cpu_count() or 1))


def _judged(trace: Trace, invariants: Sequence[Invariant], threads: int) -> Report:
    began = time.perf_counter()
    if len({run.profile for run in trace.source.runs if run.profile}) > 1:
        raise TraceError(f"{trace.path}: its runs follow different profiles, check them apart: {_by_profile(trace)}")
    profile = load(trace.profile)
    # rows in memory are shown to one connection only
    bench = Workbench(trace, profile, threads, whole=False, places=1 if trace.batches else threads)
    try:
        whole = bool(trace.batches) or facts_of(bench.sources) <= slices.SLICE_FACTS
        found = _whole(bench, invariants) if whole else _sliced(bench, invariants)
    finally:
        bench.close()
    return Report(
        path=trace.path,
        run_id=str(trace.source.run.get("run_id", "")),
        profile=profile,
        rows=found.rows,
        facts=found.facts,
        steps=found.steps,
        state=trace.state.sentence(),
        verdicts=found.verdicts,
        invariants=tuple(invariants),
        headline=headline(found.verdicts, invariants),
        seconds=time.perf_counter() - began,
        notes=(*_absent(trace, invariants), *(one.sentence() for one in lacks(trace)), *found.notes),
    )


def _by_profile(trace: Trace) -> str:
    """The files to check together, by profile, as they can be typed; of copies, the runs."""
    found: dict[str, dict[str, None]] = {}
    for run in trace.source.runs:
        names = map(str, run.files) if trace.source.temporary is None else [f"run {run.run_id}"]
        found.setdefault(run.profile, {}).update(dict.fromkeys(names))
    return "; ".join(
        f"{profile}: {' '.join(list(places)[:_SHOWN])}"
        + (f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else "")
        for profile, places in sorted(found.items())
        if profile
    )


def _absent(trace: Trace, invariants: Sequence[Invariant]) -> Iterator[str]:
    """The columns that are not there and were needed: where one is of many codes, little was judged."""
    needed = [trace.absent.intersection((*one.needs, *one.stored)) for one in invariants]
    if absent := sorted(set().union(*needed)):
        codes = sum(map(bool, needed))
        yield f"without {_columns(absent)}: {codes} of {len(invariants)} codes could not judge"


def _columns(names: Sequence[str]) -> str:
    return f"column{'' if len(names) == 1 else 's'} {', '.join(names)}"


@dataclass(frozen=True)
class _Judged:
    """What a report says of a trace."""

    rows: int
    facts: int
    steps: int
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...] = ()


def _whole(bench: Workbench, invariants: Sequence[Invariant]) -> _Judged:
    """Everything at once."""
    bench.lay(bench.read())
    missing = {one.code: _missing(bench.trace, one, bench.fields, bench.recorded) for one in invariants}
    tallies = {one.code: _Tally() for one in invariants}
    for code, found in _look(bench, [one for one in invariants if not any(missing[one.code])]):
        tallies[code].add(*found)
    return _Judged(
        rows=bench.number("select count(*) from digest_events"),
        facts=bench.number("select sum(n) from digest_events"),
        steps=bench.number("select count(distinct step_id) from events where global_steps > 0"),
        verdicts=tuple(tallies[one.code].verdict(bench.trace, one, missing[one.code]) for one in invariants),
    )


def _sliced(bench: Workbench, invariants: Sequence[Invariant]) -> _Judged:
    """A slice at a time, then what looks at the whole run."""
    found = bench.index()
    able = [one for one in invariants if not bench.trace.absent.intersection((*one.needs, *one.stored))]
    by_step = [one for one in able if one.looks == "step"]
    wanted = {name for one in able for name in one.needs}
    tallies = {one.code: _Tally() for one in invariants}
    recorded: set[str] = set()
    apart: set[int] = set()
    kept: list[Digest] = []
    for part in found.slices():
        before = _facts_beside(bench, by_step, found, part.before)
        among = _facts_beside(bench, by_step, found, part.before | part.own) if part.after else {}
        bench.lay(bench.read(found.chosen(part.own | part.before | part.after)), part.own)
        recorded.update(filter(bench.recorded, wanted - recorded))
        apart |= part.apart
        for code, (examined, accused, seconds) in _look(bench, by_step, always=True):
            tallies[code].add(among.get(code, examined) - before.get(code, 0), accused, seconds)
        kept.append(slices.run_tables(bench.digest, found.chosen(part.own)))
    bench.lay(slices.joined(kept))
    for code, seen in _look(bench, [one for one in able if one.looks == "run"]):
        tallies[code].add(*seen)
    verdicts = []
    for one in invariants:
        missing = _missing(bench.trace, one, found.fields, recorded.__contains__)
        verdicts.append(tallies[one.code].verdict(bench.trace, one, missing))
    notes = f"{len(apart):,} steps share keys with too many others to be judged beside all of them" if apart else ""
    return _Judged(
        rows=found.rows,
        facts=found.facts,
        steps=sum(1 for step in found.steps.values() if step.number is not None and step.number > 0),
        verdicts=tuple(verdicts),
        notes=(notes,) if notes else (),
    )


def _facts_beside(
    bench: Workbench, invariants: Sequence[Invariant], found: Index, steps: frozenset[int]
) -> dict[str, int]:
    """By code, how many facts these steps alone have to look at."""
    if not steps:
        return {}
    bench.lay(bench.read(found.chosen(steps)))
    own = [one for one in invariants if one.origin]
    built_in = [one for one in invariants if not one.origin]
    counted = ask_all(bench.desks, built_in, partial(_counted, bench))
    return dict(zip((one.code for one in built_in), counted, strict=True)) | {
        one.code: _asked(bench, one, partial(own_examined, bench, one)) for one in own
    }


@dataclass
class _Tally:
    """What one invariant said, slice by slice."""

    examined: int = 0
    seconds: float = 0.0
    errors: int = 0
    warnings: int = 0
    violations: list[Violation] = field(default_factory=list)
    sites: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def add(self, examined: int, found: _Found, seconds: float) -> None:
        self.examined += examined
        self.seconds += seconds
        self.errors += found.errors
        self.warnings += found.warnings
        self.violations += found.violations
        self.sites.update({(site.stage, site.op, site.field): site.count for site in found.sites})

    def verdict(self, trace: Trace, invariant: Invariant, missing: tuple[list[str], list[str]]) -> Verdict:
        """What it says in all."""
        absent, unrecorded = missing
        complete = trace.state.complete
        if absent or (unrecorded and complete):
            return Verdict(invariant.code, Kind.NOT_APPLICABLE, 0, needed=", ".join(absent + unrecorded))
        if unrecorded:  # what is lost may have held it
            said = f"{trace.state.sentence()}; {', '.join(unrecorded)}"
            return Verdict(invariant.code, Kind.INCOMPLETE, 0, needed=said)
        errors = self.errors if self.examined else 0
        if errors:
            kind = Kind.FAIL
        elif not complete:
            kind = Kind.INCOMPLETE
        else:
            kind = Kind.PASS if self.examined else Kind.VACUOUS
        needed = "" if complete or errors else trace.state.sentence()
        if not self.examined:
            return Verdict(invariant.code, kind, 0, needed=needed, seconds=self.seconds)
        order = sorted(self.violations, key=lambda one: (one.ord, one.key is None, one.key, one.expected, one.actual))
        return Verdict(
            invariant.code,
            kind,
            self.examined,
            self.errors,
            self.warnings,
            tuple(order[:LISTED]),
            tuple(Site(*place, count) for place, count in sorted(self.sites.items(), key=_by_place)),
            needed,
            self.seconds,
        )


def _by_place(item: tuple[tuple[str, str, str], int]) -> tuple[str, ...]:
    return tuple(str(part) for part in item[0])


@dataclass(frozen=True)
class _Found:
    errors: int = 0
    warnings: int = 0
    violations: tuple[Violation, ...] = ()
    sites: tuple[Site, ...] = ()


#: facts examined, what was found, and the seconds it took
_Seen = tuple[int, _Found, float]


def _look(bench: Workbench, invariants: Sequence[Invariant], always: bool = False) -> Iterator[tuple[str, _Seen]]:
    """By code, what these invariants say: those of the catalogue at all desks, a user's own one after the other."""
    built_in = [one for one in invariants if not one.origin]
    seen = ask_all(bench.desks, built_in, partial(_look_at, bench, always))
    yield from zip((one.code for one in built_in), seen, strict=True)
    for one in invariants:
        if one.origin:
            began = time.perf_counter()
            examined, accused = _asked(bench, one, partial(accuse, bench, one, always))
            yield one.code, (examined, _violations(bench, accused), time.perf_counter() - began)


def _look_at(bench: Workbench, always: bool, desk: Desk, invariant: Invariant) -> _Seen:
    began = time.perf_counter()

    def look() -> tuple[int, _Found]:
        examined = desk.number(invariant.examines)
        if not (examined or always):
            return examined, _Found()
        return examined, _violations(desk, desk.accuse(invariant.sql, invariant.severity))

    examined, found = _asked(bench, invariant, look)
    return examined, found, time.perf_counter() - began


def _counted(bench: Workbench, desk: Desk, invariant: Invariant) -> int:
    return _asked(bench, invariant, partial(desk.number, invariant.examines))


def _asked(bench: Workbench, invariant: Invariant, ask: Callable[[], Answer]) -> Answer:
    try:
        return ask()
    except duckdb.Error as error:
        if interrupted(error):
            raise
        raise TraceError(f"{bench.trace.path}: {invariant.code} cannot be judged: {first_line(error)}") from error


def _missing(
    trace: Trace, invariant: Invariant, fields: Collection[str], recorded: Callable[[str], bool]
) -> tuple[list[str], list[str]]:
    """What the invariant cannot do without: columns the trace does not have, columns and fields it never recorded."""
    absent = [name for name in (*invariant.needs, *invariant.stored) if name in trace.absent]
    empty = [name for name in invariant.needs if name not in absent and not recorded(name)]
    unrecorded = [f"column {name} (never recorded)" for name in empty]
    unrecorded += [f"field {name} (never recorded)" for name in invariant.fields if name not in fields]
    return [f"column {name} (absent)" for name in absent], unrecorded


def _violations(desk: Desk, accused: pa.Table) -> _Found:
    """The first violations as they are, and all of them counted."""
    found = accused.to_pylist()
    if not found:
        return _Found()
    counted = desk.con.execute(
        "select stage, op, field, count(*) from violations where severity = 'error' group by all order by all"
    ).fetchall()
    return _Found(
        errors=sum(count for *_, count in counted),
        warnings=desk.number("select count(*) from violations where severity = 'warning'"),
        violations=tuple(Violation(**row) for row in found),
        sites=tuple(Site(*site) for site in counted),
    )
