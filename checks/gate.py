"""Judging traces as a gate does: the chosen invariants, known violations accepted, and what that leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lineage.checks.baseline import Baseline
from lineage.checks.blame import headline, traced
from lineage.checks.catalogue import CatalogueError, Invariant, available, select
from lineage.checks.engine import judge
from lineage.checks.policy import Policy
from lineage.checks.report import Outcome, Refused, Report
from lineage.checks.settings import Settings, counts, names
from lineage.errors import UserError
from lineage.traces import Trace, TraceError, open_trace
from lineage.traces.errors import reading
from lineage.traces.interrupts import interruptible


@dataclass(frozen=True)
class Gate:
    """A set of invariants and what is let through.

    Attributes:
        invariants: the chosen ones.
        policy: what the exit code lets through.
        baseline: known violations.
    """

    invariants: tuple[Invariant, ...]
    policy: Policy
    baseline: Baseline | None = None

    @classmethod
    def of(cls, settings: Settings) -> Gate:
        """The gate these settings describe.

        Raises:
            CatalogueError: a code nobody knows, or one that is required and left out.
            BaselineError: the baseline file cannot be read.
        """
        known = available(settings.checks)
        chosen = select(settings.select, settings.ignore, known)
        if not chosen:
            raise CatalogueError("no invariant is left to judge by: ignore leaves out all that select names")
        policy = settings.policy
        for option, codes in (("require", policy.require), ("max-violations", policy.max_violations)):
            for code in codes:
                select([code], known=known)  # one that nobody knows is a mistake
                if not any(one.code == code for one in known):
                    raise CatalogueError(f"{option} {code}: that is a family; name a code of it")
        left_out = [code for code in policy.require if code not in {one.code for one in chosen}]
        if left_out:
            raise CatalogueError(f"require {', '.join(left_out)}: left out by select or ignore")
        baseline = None if settings.baseline is None else Baseline.load(settings.baseline)
        return cls(chosen, policy, baseline)

    def judge(self, trace: Trace, threads: int | None = None) -> Report:
        """What the gate says of an open trace."""
        report = self.apply(judge(trace, self.invariants, threads))
        if report.headline is None:
            return report
        with interruptible(trace.connection), reading(trace.path):
            return replace(report, headline=traced(report.headline, trace))

    def judge_all(self, paths: Iterable[str | Path]) -> list[Outcome]:
        """What it says of each of these traces; one that cannot be read is refused, and the others are judged."""
        outcomes: list[Outcome] = []
        for path in paths:
            try:
                with _opened(path) as trace:
                    outcomes.append(self.judge(trace))
            except TraceError as error:
                outcomes.append(Refused(path, str(error)))
        return self.noted(outcomes)

    def apply(self, report: Report) -> Report:
        """The report with what the gate lets through accepted, and a headline of the rest."""
        verdicts = report.verdicts
        if self.baseline is not None:
            verdicts = tuple(map(self.baseline.accept, verdicts))
        verdicts = tuple(map(self.policy.accept, verdicts))
        return replace(report, verdicts=verdicts, headline=headline(verdicts, self.invariants), policy=self.policy)

    def noted(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """The outcomes of one check; the last report says which known violations occurred in none of them."""
        reports = [one for one in outcomes if isinstance(one, Report)]
        gone = 0 if self.baseline is None or len(reports) < len(outcomes) else self.baseline.gone(reports)
        if not gone:
            return list(outcomes)
        said = "1 known violation" if gone == 1 else f"{gone:,} known violations"
        note = f"{said} did not occur: --update-baseline forgets {'it' if gone == 1 else 'them'}"
        return [*outcomes[:-1], replace(reports[-1], notes=(*reports[-1].notes, note))]


def check(
    trace: Trace | str | Path,
    *,
    select: str | Sequence[str] = (),
    ignore: str | Sequence[str] = (),
    require: str | Sequence[str] | Mapping[str, int] = (),
    allow_incomplete: bool = False,
    baseline: str | Path | None = None,
    checks: str | Path | Sequence[str | Path] = (),
    threads: int | None = None,
) -> Report:
    """Judge one trace.

    Args:
        trace: an open trace, or what ``lineage.open`` takes.
        select: codes or families; all when empty.
        ignore: codes or families to leave out.
        require: codes that must have examined something, or so many facts (``{"KEY001": 100}``).
        allow_incomplete: an incomplete trace is as good as a complete one.
        baseline: file of known violations.
        checks: folders of your own invariants.
        threads: to read with; a few when None.

    Raises:
        TraceError: there is no readable trace.
        CatalogueError: a code nobody knows, or an invariant that cannot be run.
        BaselineError: the baseline file cannot be read.
    """
    try:
        required = counts(require, default=1)
    except ValueError as error:
        raise UserError(f"require: {error}") from error
    settings = Settings(
        select=names(select),
        ignore=names(ignore),
        policy=Policy(require=required, allow_incomplete=allow_incomplete),
        baseline=None if baseline is None else Path(baseline),
        checks=(Path(checks),) if isinstance(checks, str | Path) else tuple(map(Path, checks)),
    )
    gate = Gate.of(settings)
    if isinstance(trace, Trace):
        return _noted(gate, gate.judge(trace, threads))
    with _opened(trace) as opened:
        return _noted(gate, gate.judge(opened, threads))


def _opened(path: str | Path) -> Trace:
    """A trace to be asked at several desks: a statement on one thread costs a tenth less than on all of them."""
    return open_trace(path, threads=1, views=False)


def _noted(gate: Gate, report: Report) -> Report:
    (noted,) = gate.noted([report])
    assert isinstance(noted, Report)
    return noted
