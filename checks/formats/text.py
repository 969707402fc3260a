"""A report as text: the first bad event, what follows from it, then every verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from lineage.checks.blame import Headline
from lineage.checks.catalogue import catalogue
from lineage.checks.engine import Report
from lineage.checks.verdict import Kind, Verdict

_SHOWN_KEYS = 3
_NAMES = {Kind.NOT_APPLICABLE: "not_applicable", Kind.VACUOUS: "vacuous", Kind.INCOMPLETE: "incomplete"}


def to_text(report: Report, quiet: bool = False) -> str:
    """The report as plain text, without colour.

    Args:
        report: what the checks said.
        quiet: of the verdicts, only those that failed.
    """
    return "\n".join(_lines(report, quiet))


def summary(report: Report) -> str:
    """One line: how many checks said what, over how much."""
    counts = Counter(verdict.kind for verdict in report.verdicts)
    said = ", ".join(f"{counts[kind]} {kind.value}" for kind in Kind if counts[kind])
    return (
        f"{report.path}: {said}; {report.rows:,} rows, {report.facts:,} facts, "
        f"{report.steps} steps in {report.seconds:.2f} s"
    )


def _lines(report: Report, quiet: bool) -> Iterator[str]:
    if report.headline is not None:
        yield from _headline(report.headline)
        yield ""
    if not report.profile.known:
        yield f"profile {report.profile.name!r} is not known: judged by the conventions of 'lineage'"
    if report.state:
        yield f"incomplete trace: {report.state}; complete steps are judged"
    names = {one.code: one.name for one in catalogue()}
    width = max((len(name) for name in names.values()), default=0)
    for verdict in report.verdicts:
        if not quiet or verdict.kind is Kind.FAIL:
            yield f"{verdict.code}  {names.get(verdict.code, ''):<{width}}  {_verdict(verdict)}"
    for verdict in report.verdicts:
        first = verdict.first
        if verdict.warnings and first is not None:
            shown = next(one for one in verdict.violations if one.severity == "warning")
            where = f"step {shown.global_steps}, {shown.stage}, {shown.field}"
            why = f" ({shown.detail})" if shown.detail else ""
            yield (
                f"warning {verdict.code} ({verdict.warnings}): {where}: "
                f"expected {shown.expected}, got {shown.actual}{why}"
            )
    yield summary(report)


def _headline(head: Headline) -> Iterator[str]:
    one = head.violation
    yield f"{head.invariant.code} {head.invariant.name}: first broken at step {one.global_steps}, stage {one.stage}"
    yield f"  {head.invariant.says}"
    yield f"  event     {one.op} {one.field} ({one.process}, seq {one.seq})"
    if head.keys:
        more = f" and {len(head.keys) - _SHOWN_KEYS} more" if len(head.keys) > _SHOWN_KEYS else ""
        yield f"  at        {', '.join(head.keys[:_SHOWN_KEYS])}{more}"
    yield f"  expected  {one.expected}"
    yield f"  actual    {one.actual}" + (f" ({one.detail})" if one.detail else "")
    yield f"  usually   {head.invariant.causes}"
    yield f"  {head.count} violation{'s' if head.count != 1 else ''} in all"
    names = {invariant.code: invariant.name for invariant in catalogue()}
    for other in head.consequences:
        follows = f"follows from {other.follows}" if other.follows else "on its own"
        plural = "s" if other.count != 1 else ""
        yield f"  also: {other.code} {names.get(other.code, '')} ({other.count} violation{plural}, {follows})"


def _verdict(verdict: Verdict) -> str:
    examined = f"{verdict.examined:>12,} examined"
    if verdict.kind is Kind.FAIL:
        return f"{'FAIL':<14}{examined}, {verdict.errors:,} violation{'s' if verdict.errors != 1 else ''}"
    if verdict.kind is Kind.NOT_APPLICABLE:
        return f"{'not_applicable':<14}  needs {verdict.needed}"
    note = f", {verdict.warnings:,} warning{'s' if verdict.warnings != 1 else ''}" if verdict.warnings else ""
    return f"{_NAMES.get(verdict.kind, verdict.kind.value):<14}{examined}{note}"
