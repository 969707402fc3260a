"""Assertions on traces for test suites: the message of one that fails is the check's headline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from lineage.checks.formats.text import headline_lines
from lineage.checks.gate import check
from lineage.checks.report import Report
from lineage.checks.verdict import Kind, Verdict, Violation
from lineage.errors import LineageError, UserError
from lineage.traces import Trace

_SHOWN = 5  # lines of a list in a message
_CALLED = {"global_steps": "step"}

_judged: WeakKeyDictionary[Trace, dict[str, str]] = WeakKeyDictionary()


class Recorded(Protocol):
    """Something that leaves a trace, such as a recording of ``lineage.testing``."""

    @property
    def trace(self) -> Path:
        """Where the trace lies."""


def assert_invariants(
    trace: Trace | Report | Recorded | str | Path,
    *,
    select: str | Sequence[str] = (),
    ignore: str | Sequence[str] = (),
    require: str | Sequence[str] | Mapping[str, int] = (),
    allow_incomplete: bool = False,
    baseline: str | Path | None = None,
    checks: Sequence[str | Path] = (),
) -> Report:
    """Assert that a trace keeps its contracts. An assertion that looked at nothing does not hold either.

    Args:
        trace: what ``lineage.open`` takes, an open trace, a recording, or the report of a check already made.
        select: codes or families; all when empty.
        ignore: codes or families to leave out.
        require: codes that must have examined something, or so many facts (``{"KEY001": 100}``).
        allow_incomplete: an incomplete trace is as good as a complete one.
        baseline: file of known violations.
        checks: folders of your own invariants.

    Returns:
        The report, for what else a test wants to know.

    Raises:
        AssertionError: violations, a required code that did not see enough, an incomplete trace, or nothing examined.
        UserError: no readable trace, a code nobody knows, or a report that is to be judged again.
    """
    __tracebackhide__ = True
    try:
        report = _report(
            trace,
            select=select,
            ignore=ignore,
            require=require,
            allow_incomplete=allow_incomplete,
            baseline=baseline,
            checks=checks,
        )
    except LineageError as error:
        raise error.with_traceback(None) from None  # the caller's line is the one to see
    message = "\n".join(_complaint(report))
    if message:
        raise AssertionError(message)
    return report


def assert_violates(
    trace: Trace | Report | Recorded | str | Path,
    code: str,
    *,
    stage: str | None = None,
    field: str | None = None,
    key: str | None = None,
    step: int | None = None,
    checks: Sequence[str | Path] = (),
) -> tuple[Violation, ...]:
    """Assert that an invariant catches a fault: the trace violates it, at this place if one is given.

    Args:
        trace: as for :func:`assert_invariants`.
        code: the invariant.
        stage: stage a violation must be in.
        field: field it must be of.
        key: trajectory key, uid or metric it must be at.
        step: global step it must be in.
        checks: folders of your own invariants.

    Returns:
        The violations at that place, warnings among them; of all of a code, the first thousand are looked at.

    Raises:
        AssertionError: there is none.
        UserError: no readable trace, a code nobody knows, or one that the report did not judge.
    """
    __tracebackhide__ = True
    try:
        verdict = _verdict(_report(trace, select=() if isinstance(trace, Report) else code, checks=checks), code)
    except LineageError as error:
        raise error.with_traceback(None) from None
    wanted = {"stage": stage, "field": field, "key": key, "global_steps": step}
    place = {name: value for name, value in wanted.items() if value is not None}
    found = tuple(one for one in verdict.violations if all(getattr(one, name) == place[name] for name in place))
    if not found:
        raise AssertionError("\n".join(_no_violation(verdict, place)))
    return found


def verdicts_on(trace: Trace) -> dict[str, str]:
    """What the assertions of this process found on an open trace: the last verdict of each code."""
    return dict(_judged.get(trace, {}))


def _report(trace: Trace | Report | Recorded | str | Path, **options: Any) -> Report:
    """The report of a trace under the options of ``lineage.check``, or the report given."""
    if isinstance(trace, Report):
        if any(value for value in options.values()):
            raise UserError("a report is judged already: give these options to lineage.check, or give the trace")
        return trace
    if not isinstance(trace, Trace | str | Path):
        if not hasattr(trace, "trace"):
            raise UserError(f"{trace!r}: give a path, an open trace, a recording or a report")
        trace = trace.trace
    report = check(trace, **options)
    if isinstance(trace, Trace):
        said = {one.code: one.word for one in report.verdicts}
        _judged.setdefault(trace, {}).update(said)
    return report


def _verdict(report: Report, code: str) -> Verdict:
    try:
        return report.verdict(code)
    except KeyError:
        judged = ", ".join(one.code for one in report.verdicts)
        raise UserError(f"{code}: name one code of those judged: {judged}") from None


def _complaint(report: Report) -> Iterator[str]:
    """What is to be said of a report that does not hold; nothing of one that does."""
    seen = any(one.examined for one in report.verdicts)
    if report.ok and seen:
        return
    if report.headline is not None:
        yield from headline_lines(report.headline, report.name)
    yield from report.complaints
    if report.state and not report.policy.allow_incomplete:
        yield f"incomplete trace: {report.state}"
        yield f"  judged    the complete steps ({report.steps:,})"
        lacking = [one for one in report.verdicts if one.kind is Kind.INCOMPLETE and one.needed != report.state]
        yield from _shortened([f"  not seen  {one.code} {_why(one, report.state)}" for one in lacking])
    elif not seen:
        yield "nothing was examined: no invariant found what it looks at"
        yield from _shortened([f"  {one.code}    {_why(one, report.state)}" for one in report.verdicts])
    yield f"  trace     {report.path}"


def _why(verdict: Verdict, state: str) -> str:
    """What a verdict lacks, beside what the whole trace does; else which it is."""
    needed = verdict.needed.removeprefix(state).removeprefix("; ")
    return f"needs {needed}" if needed else verdict.kind.value


def _no_violation(verdict: Verdict, place: Mapping[str, object]) -> Iterator[str]:
    """What was found instead of a violation at this place."""
    where = ", ".join(f"{_CALLED.get(name, name)} {value}" for name, value in place.items())
    at = f" at {where}" if where else ""
    found = [
        f"  step {one.global_steps}, stage {one.stage}, field {one.field}" + (f", key {one.key}" if one.key else "")
        for one in verdict.violations
    ]
    if not found:
        needed = f" ({verdict.needed})" if verdict.needed else ""
        yield f"{verdict.code} is not violated{at}: {verdict.kind.value}{needed}, {verdict.examined:,} examined"
        return
    yield f"{verdict.code} is not violated{at}, but elsewhere:"
    yield from _shortened(found)
    if verdict.errors + verdict.warnings > len(found):
        yield f"  only the first {len(found):,} of {verdict.errors + verdict.warnings:,} were looked at"


def _shortened(lines: Sequence[str]) -> Iterator[str]:
    yield from lines[:_SHOWN]
    if len(lines) > _SHOWN:
        yield f"  and {len(lines) - _SHOWN:,} more"
