"""A report as text: the first bad event, what follows from it, then every verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from lineage.checks.blame import Headline
from lineage.checks.catalogue import Invariant, get
from lineage.checks.change import Change
from lineage.checks.formats.plain import plain, plural
from lineage.checks.report import Outcome, Refused, Report
from lineage.checks.verdict import ACCEPTED, ExitCode, Kind, Verdict, Violation

_SHOWN_KEYS = 3
_WIDTH = 14


def render(outcomes: Sequence[Outcome], quiet: bool = False) -> str:
    """The reports one after another, without colour.

    Args:
        outcomes: of all traces.
        quiet: of the verdicts, only those that failed.
    """
    said = (f"error: {plain(one.message)}" if isinstance(one, Refused) else to_text(one, quiet) for one in outcomes)
    return "\n\n".join(said)


def to_text(report: Report, quiet: bool = False) -> str:
    """One report as plain text; what the trace says in it cannot break a line."""
    return "\n".join(map(plain, _lines(report, quiet)))


def summary(report: Report) -> str:
    """One line: how many checks said what, over how much."""
    counts = Counter(verdict.word for verdict in report.verdicts)
    said = ", ".join(f"{counts[word]} {word}" for word in (*Kind, ACCEPTED) if counts[word])
    return (
        f"{report.path}: {said}; {report.rows:,} rows, {report.facts:,} facts, "
        f"{report.steps} steps in {report.seconds:.2f} s"
    )


def headline_lines(head: Headline, name: Callable[[str], str]) -> Iterator[str]:
    """The first bad event: where, which trajectories, expected and actual, the usual cause, what follows from it.

    Args:
        head: the headline.
        name: what the invariant of a code calls itself.
    """
    yield from _broken(head.invariant, head.violation, head.keys, head.count, change=head.change)
    for other in head.consequences:
        follows = f"follows from {other.follows}" if other.follows else "on its own"
        yield f"  also: {other.code} {name(other.code)} ({plural(other.count, 'violation')}, {follows})"


def failure_lines(report: Report, verdict: Verdict) -> Iterator[str]:
    """What the headline says, of one code that has violations: of the headline's own, the headline itself."""
    head = report.headline
    if head is not None and head.invariant.code == verdict.code:
        yield from headline_lines(head, report.name)
        return
    first = verdict.first
    if first is None:
        return
    same = [one for one in verdict.violations if (one.ord, one.accepted) == (first.ord, first.accepted)]
    keys = tuple(dict.fromkeys(one.key for one in same if one.key is not None))
    count = verdict.new or verdict.errors or verdict.warnings
    yield from _broken(get(verdict.code, report.invariants), first, keys, count, first.severity)
    follows = [one.follows for one in (head.consequences if head else ()) if one.code == verdict.code and one.follows]
    yield from (f"  follows from {cause} {plain(report.name(cause))}" for cause in follows)


def _broken(
    invariant: Invariant,
    one: Violation,
    keys: Sequence[str],
    count: int,
    severity: str = "error",
    change: Change | None = None,
) -> Iterator[str]:
    lines = [
        f"{invariant.code} {invariant.name}: first broken at step {one.global_steps}, stage {one.stage}",
        f"  {invariant.says}",
        f"  event     {one.op} {one.field} ({one.process}, seq {one.seq})",
    ]
    if keys:
        more = f" and {len(keys) - _SHOWN_KEYS} more" if len(keys) > _SHOWN_KEYS else ""
        lines.append(f"  at        {', '.join(keys[:_SHOWN_KEYS])}{more}")
    lines += [
        f"  expected  {one.expected}",
        f"  actual    {one.actual}" + (f" ({one.detail})" if one.detail else ""),
        *(_changed(change) if change else ()),
        *([f"  usually   {invariant.causes}"] if invariant.causes else []),
        f"  {plural(count, 'violation' if severity == 'error' else 'warning')} in all",
    ]
    return map(plain, lines)


def _changed(change: Change) -> Iterator[str]:
    """Whose content it was, and the two events it changed between."""
    who = f" {change.producer} wrote" if change.producer else " written"
    yield f"  changed   the {change.what}{who}: {change.written}"
    if change.before != change.written:
        yield f"            the last that still had it: {change.before}"
    whose = f", with the {change.what} of {change.whose}" if change.whose else ""
    yield f"            the first that had another: {change.after}{whose}"


def _lines(report: Report, quiet: bool) -> Iterator[str]:
    if report.headline is not None:
        yield from headline_lines(report.headline, report.name)
        yield ""
    if not report.profile.known:
        yield f"profile {report.profile.name!r} is not known: judged by the conventions of 'lineage'"
    if report.state:
        stops = " (exit code 3 unless --allow-incomplete)" if report.exit_code is ExitCode.INCOMPLETE else ""
        yield f"incomplete trace: {report.state}; complete steps are judged{stops}"
    width = max((len(one.name) for one in report.invariants), default=0)
    for verdict in report.verdicts:
        if not quiet or verdict.new:
            yield f"{verdict.code}  {report.name(verdict.code):<{width}}  {_verdict(verdict, report)}"
    for verdict in report.verdicts:
        for shown in [one for one in verdict.violations if one.severity == "warning"][:1]:
            where = f"step {shown.global_steps}, {shown.stage}, {shown.field}"
            why = f" ({shown.detail})" if shown.detail else ""
            yield (
                f"warning {verdict.code} ({verdict.warnings}): {where}: "
                f"expected {shown.expected}, got {shown.actual}{why}"
            )
    yield from (f"fails: {complaint}" for complaint in report.complaints)
    yield from (f"note: {note}" for note in report.notes)
    yield summary(report)


def _verdict(verdict: Verdict, report: Report) -> str:
    kind = "FAIL" if verdict.new else verdict.word
    if verdict.kind is Kind.NOT_APPLICABLE:
        return f"{kind:<{_WIDTH}}  needs {verdict.needed}"
    said = [f"{verdict.examined:>12,} examined"]
    if verdict.errors:
        said.append(plural(verdict.errors, "violation"))
    if verdict.accepted:
        said.append("all accepted" if not verdict.new else f"{verdict.accepted:,} accepted")
    if verdict.warnings:
        said.append(plural(verdict.warnings, "warning"))
    if verdict.kind is Kind.INCOMPLETE and verdict.needed != report.state:  # the state is said once, above
        said.append(f"needs {verdict.needed.removeprefix(report.state + '; ')}")
    return f"{kind:<{_WIDTH}}{', '.join(said)}"
