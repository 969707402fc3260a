"""Runs the catalogue over one trace: the workbench once, then every invariant, then the headline."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb

from lineage.checks.blame import Headline, headline
from lineage.checks.catalogue import CatalogueError, Invariant, catalogue
from lineage.checks.profiles import Profile, load
from lineage.checks.verdict import ExitCode, Kind, Verdict, Violation, exit_code
from lineage.checks.workbench import Workbench
from lineage.traces import Trace, open_trace


@dataclass(frozen=True)
class Report:
    """All verdicts on one trace.

    Attributes:
        path: the trace.
        run_id: the run it records.
        profile: whose conventions were used.
        rows: trace rows.
        facts: elements of all rows.
        steps: training steps judged.
        state: what is missing from the trace; empty when complete.
        verdicts: one per invariant run, by code.
        headline: the first bad event; None when nothing failed.
        seconds: time the whole took.
    """

    path: Path
    run_id: str
    profile: Profile
    rows: int
    facts: int
    steps: int
    state: str
    verdicts: tuple[Verdict, ...]
    headline: Headline | None
    seconds: float

    def exit_code(self, allow_incomplete: bool = False, required: Sequence[str] = ()) -> ExitCode:
        """The exit code this report stands for."""
        return exit_code(self.verdicts, allow_incomplete, required)


def check_path(path: str | Path, invariants: Sequence[Invariant] | None = None, threads: int | None = None) -> Report:
    """Open a trace, check it and close it.

    Raises:
        TraceError: the path holds no readable trace.
    """
    with open_trace(path, threads=threads, views=False) as trace:
        return check(trace, invariants, threads)


def check(trace: Trace, invariants: Sequence[Invariant] | None = None, threads: int | None = None) -> Report:
    """Judge a trace by these invariants, all of the catalogue when None."""
    began = time.perf_counter()
    chosen = tuple(catalogue() if invariants is None else invariants)
    profile = load(trace.profile)
    bench = Workbench(trace, profile, threads or min(4, os.cpu_count() or 1))
    verdicts = tuple(_judge(bench, one) for one in chosen)
    return Report(
        path=trace.path,
        run_id=str(trace.source.run.get("run_id", "")),
        profile=profile,
        rows=bench.number("select count(*) from digest_events"),
        facts=bench.number("select sum(n) from digest_events"),
        steps=bench.number("select count(distinct global_steps) from events where global_steps > 0"),
        state=trace.state.sentence(),
        verdicts=verdicts,
        headline=headline(verdicts, chosen),
        seconds=time.perf_counter() - began,
    )


def _judge(bench: Workbench, invariant: Invariant) -> Verdict:
    began = time.perf_counter()
    complete = bench.trace.state.complete
    absent, unrecorded = _missing(bench, invariant)
    if absent or (unrecorded and complete):
        return Verdict(invariant.code, Kind.NOT_APPLICABLE, 0, needed=", ".join(absent + unrecorded))
    if unrecorded:  # what is lost may have held it
        said = f"{bench.trace.state.sentence()}; {', '.join(unrecorded)}"
        return Verdict(invariant.code, Kind.INCOMPLETE, 0, needed=said)
    try:
        examined = bench.number(invariant.examines)
        errors, warnings, violations = _violations(bench, invariant) if examined else (0, 0, ())
    except duckdb.Error as error:
        said = str(error).splitlines()[0]
        raise CatalogueError(f"{invariant.code}: its query failed on this trace: {said}") from error
    seconds = time.perf_counter() - began
    if errors:
        return Verdict(invariant.code, Kind.FAIL, examined, errors, warnings, violations, seconds=seconds)
    if not complete:
        said = bench.trace.state.sentence()
        return Verdict(invariant.code, Kind.INCOMPLETE, examined, 0, warnings, violations, said, seconds)
    kind = Kind.PASS if examined else Kind.VACUOUS
    return Verdict(invariant.code, kind, examined, 0, warnings, violations, seconds=seconds)


def _missing(bench: Workbench, invariant: Invariant) -> tuple[list[str], list[str]]:
    """What the invariant cannot do without: columns the trace does not have, columns and fields it never recorded."""
    absent = [name for name in invariant.needs if name in bench.trace.absent]
    empty = [name for name in invariant.needs if name not in absent and not bench.recorded(name)]
    fields = [name for name in invariant.fields if name not in bench.fields]
    unrecorded = [f"column {name} (never recorded)" for name in empty]
    unrecorded += [f"field {name} (never recorded)" for name in fields]
    return [f"column {name} (absent)" for name in absent], unrecorded


def _violations(bench: Workbench, invariant: Invariant) -> tuple[int, int, tuple[Violation, ...]]:
    found = bench.accuse(invariant.sql, invariant.severity).to_pylist()
    if not found:
        return 0, 0, ()
    errors = bench.number("select count(*) from violations where severity = 'error'")
    warnings = bench.number("select count(*) from violations where severity = 'warning'")
    return errors, warnings, tuple(Violation(**row) for row in found)
