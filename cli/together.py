"""Several recorded runs judged at once: the queries of the catalogue are planned once for all of them, not once a run.

Runs of one trace share nothing but the tables they lie in, so each is judged as if alone. Where the report of many says
too little of one (it lists a thousand violations a code), nothing is said, and the caller judges each run by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lineage.checks.report import Report
    from lineage.checks.verdict import Verdict

#: runs judged at once; more of them gain little
TOGETHER = 12


@dataclass(frozen=True)
class Place:
    """The first bad event of a run, or of one code."""

    code: str
    stage: str
    step: int

    def __str__(self) -> str:
        return f"{self.code} at {self.stage}, step {self.step}"


@dataclass(frozen=True)
class Seen:
    """What one code said of one run: the verdict, how many facts it examined, errors and warnings.

    Of runs judged together, ``examined`` counts the facts of them all.
    """

    verdict: str
    examined: int
    errors: int
    warnings: int


@dataclass(frozen=True)
class Judgement:
    """What the whole catalogue says of one run.

    Attributes:
        blamed: the headline's place; None where nothing failed.
        warned: the first warning of each code that warns, in the order of the events.
        seen: by code.
        clean: the run is complete and nothing failed.
    """

    blamed: Place | None
    warned: tuple[Place, ...]
    seen: dict[str, Seen]
    clean: bool


def judgement(report: Report) -> Judgement:
    """Of a report on one run."""
    return _judgement(report, report.verdicts, complete=not report.exit_code)


def judged_together(folder: Path, run_ids: Sequence[str]) -> dict[str, Judgement]:
    """Of each run whose trace lies in a folder; empty where the report of all says too little of each.

    Args:
        folder: holds the traces of these runs, a file each, and nothing else.
        run_ids: their names.
    """
    report = judged(folder)
    if report.state or any(one.errors + one.warnings > len(one.violations) for one in report.verdicts):
        return {}
    return {run_id: _judgement(report, [_of_run(one, run_id) for one in report.verdicts]) for run_id in run_ids}


def judged(path: Path, codes: Sequence[str] = ()) -> Report:
    """The report of the whole catalogue, or of these codes, and by no settings of the folder it is asked in."""
    from lineage.checks.catalogue import catalogue, select
    from lineage.checks.gate import Gate
    from lineage.checks.policy import Policy
    from lineage.traces import open_trace

    with open_trace(path, threads=1, views=False) as trace:
        return Gate(select(codes, known=catalogue()), Policy()).judge(trace, threads=1)


def _of_run(verdict: Verdict, run_id: str) -> Verdict:
    from lineage.checks.verdict import Kind

    mine = tuple(one for one in verdict.violations if one.run_id == run_id)
    errors = sum(one.severity == "error" for one in mine)
    kind = Kind.FAIL if errors else Kind.PASS if verdict.kind is Kind.FAIL else verdict.kind
    return replace(verdict, kind=kind, errors=errors, warnings=len(mine) - errors, violations=mine)


def _judgement(report: Report, verdicts: Sequence[Verdict], complete: bool = True) -> Judgement:
    from lineage.checks.blame import headline

    head = headline(verdicts, report.invariants)
    blamed = None if head is None else Place(head.invariant.code, head.violation.stage, head.violation.global_steps)
    warnings = (
        (one.code, next((said for said in one.violations if said.severity != "error"), None)) for one in verdicts
    )
    firsts = sorted(((code, said) for code, said in warnings if said is not None), key=lambda first: first[1].ord)
    return Judgement(
        blamed,
        tuple(Place(code, said.stage, said.global_steps) for code, said in firsts),
        {one.code: Seen(one.kind.value, one.examined, one.errors, one.warnings) for one in verdicts},
        complete and head is None,
    )
