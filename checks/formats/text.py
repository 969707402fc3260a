"""A report as text: the first bad event, what follows from it, then every verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from lineage.checks.blame import Headline
from lineage.checks.report import Outcome, Refused, Report
from lineage.checks.verdict import Kind, Verdict

_SHOWN_KEYS = 3
_WIDTH = 14
_ACCEPTED = "accepted"


def render(outcomes: Sequence[Outcome], quiet: bool = False) -> str:
    """The reports one after another, without colour.

    Args:
        outcomes: of all traces.
        quiet: of the verdicts, only those that failed.
    """
    return "\n\n".join(f"error: {one.message}" if isinstance(one, Refused) else to_text(one, quiet) for one in outcomes)


def to_text(report: Report, quiet: bool = False) -> str:
    """One report as plain text."""
    return "\n".join(_lines(report, quiet))


def summary(report: Report) -> str:
    """One line: how many checks said what, over how much."""
    counts = Counter(map(_word, report.verdicts))
    said = ", ".join(f"{counts[word]} {word}" for word in (*Kind, _ACCEPTED) if counts[word])
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
    yield f"  {_plural(head.count, 'violation')} in all"
    for other in head.consequences:
        follows = f"follows from {other.follows}" if other.follows else "on its own"
        yield f"  also: {other.code} {name(other.code)} ({_plural(other.count, 'violation')}, {follows})"


def _lines(report: Report, quiet: bool) -> Iterator[str]:
    if report.headline is not None:
        yield from headline_lines(report.headline, report.name)
        yield ""
    if not report.profile.known:
        yield f"profile {report.profile.name!r} is not known: judged by the conventions of 'lineage'"
    if report.state:
        yield f"incomplete trace: {report.state}; complete steps are judged"
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
    yield from (f"refused: {complaint}" for complaint in report.complaints)
    yield from (f"note: {note}" for note in report.notes)
    yield summary(report)


def _verdict(verdict: Verdict, report: Report) -> str:
    kind = "FAIL" if verdict.new else _word(verdict)
    if verdict.kind is Kind.NOT_APPLICABLE:
        return f"{kind:<{_WIDTH}}  needs {verdict.needed}"
    said = [f"{verdict.examined:>12,} examined"]
    if verdict.errors:
        said.append(_plural(verdict.errors, "violation"))
    if verdict.accepted:
        said.append("all accepted" if not verdict.new else f"{verdict.accepted:,} accepted")
    if verdict.warnings:
        said.append(_plural(verdict.warnings, "warning"))
    if verdict.kind is Kind.INCOMPLETE and verdict.needed != report.state:  # the state is said once, above
        said.append(f"needs {verdict.needed.removeprefix(report.state + '; ')}")
    return f"{kind:<{_WIDTH}}{', '.join(said)}"


def _word(verdict: Verdict) -> str:
    """The verdict in a word; violations that are all accepted are neither a pass nor a failure of the gate."""
    return _ACCEPTED if verdict.errors and not verdict.new else verdict.kind.value


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"
