"""Runs invariants over one trace: the workbench once, then every invariant, then the headline."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import duckdb
import pyarrow as pa

from lineage.checks.blame import headline
from lineage.checks.catalogue import Invariant
from lineage.checks.own import accuse
from lineage.checks.profiles import load
from lineage.checks.report import Report
from lineage.checks.verdict import Kind, Site, Verdict, Violation
from lineage.checks.workbench import Workbench
from lineage.errors import first_line
from lineage.traces import Trace, TraceError
from lineage.traces.errors import reading
from lineage.traces.interrupts import interrupted, interruptible


def judge(trace: Trace, invariants: Sequence[Invariant], threads: int | None = None) -> Report:
    """What these invariants say of a trace.

    Raises:
        TraceError: it cannot be read, or its runs follow different profiles.
    """
    with interruptible(trace.connection), reading(trace.path):
        return _judged(trace, invariants, threads or min(4, os.cpu_count() or 1))


def _judged(trace: Trace, invariants: Sequence[Invariant], threads: int) -> Report:
    began = time.perf_counter()
    profiles = sorted({run.profile for run in trace.source.runs if run.profile})
    if len(profiles) > 1:
        raise TraceError(f"{trace.path}: its runs follow different profiles ({', '.join(profiles)}): check them apart")
    profile = load(trace.profile)
    bench = Workbench(trace, profile, threads)
    verdicts = tuple(_judge(bench, one) for one in invariants)
    return Report(
        path=trace.path,
        run_id=str(trace.source.run.get("run_id", "")),
        profile=profile,
        rows=bench.number("select count(*) from digest_events"),
        facts=bench.number("select sum(n) from digest_events"),
        steps=bench.number("select count(distinct step_id) from events where global_steps > 0"),
        state=trace.state.sentence(),
        verdicts=verdicts,
        invariants=tuple(invariants),
        headline=headline(verdicts, invariants),
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
        examined, accused = accuse(bench, invariant) if invariant.origin else _accuse(bench, invariant)
        found = _violations(bench, accused)
    except duckdb.Error as error:
        if interrupted(error):
            raise
        raise TraceError(f"{bench.trace.path}: {invariant.code} cannot be judged: {first_line(error)}") from error
    needed = "" if complete else bench.trace.state.sentence()
    if found.errors:
        kind, needed = Kind.FAIL, ""
    elif not complete:
        kind = Kind.INCOMPLETE
    else:
        kind = Kind.PASS if examined else Kind.VACUOUS
    return Verdict(
        invariant.code,
        kind,
        examined,
        found.errors,
        found.warnings,
        found.violations,
        found.sites,
        needed,
        time.perf_counter() - began,
    )


@dataclass(frozen=True)
class _Found:
    errors: int = 0
    warnings: int = 0
    violations: tuple[Violation, ...] = ()
    sites: tuple[Site, ...] = ()


def _missing(bench: Workbench, invariant: Invariant) -> tuple[list[str], list[str]]:
    """What the invariant cannot do without: columns the trace does not have, columns and fields it never recorded."""
    absent = [name for name in invariant.needs if name in bench.trace.absent]
    empty = [name for name in invariant.needs if name not in absent and not bench.recorded(name)]
    fields = [name for name in invariant.fields if name not in bench.fields]
    unrecorded = [f"column {name} (never recorded)" for name in empty]
    unrecorded += [f"field {name} (never recorded)" for name in fields]
    return [f"column {name} (absent)" for name in absent], unrecorded


def _accuse(bench: Workbench, invariant: Invariant) -> tuple[int, pa.Table]:
    examined = bench.number(invariant.examines)
    return examined, bench.accuse(invariant.sql, invariant.severity) if examined else pa.table({})


def _violations(bench: Workbench, accused: pa.Table) -> _Found:
    """The first violations as they are, and all of them counted."""
    found = accused.to_pylist()
    if not found:
        return _Found()
    counted = bench.con.execute(
        "select stage, op, field, count(*) from violations where severity = 'error' group by all order by all"
    ).fetchall()
    return _Found(
        errors=sum(count for *_, count in counted),
        warnings=bench.number("select count(*) from violations where severity = 'warning'"),
        violations=tuple(Violation(**row) for row in found),
        sites=tuple(Site(*site) for site in counted),
    )
