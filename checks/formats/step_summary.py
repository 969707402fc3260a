"""A report as Markdown, for the summary of a GitHub step: headlines, every verdict, as many violations as fit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from lineage.checks.formats.plain import plain
from lineage.checks.formats.text import headline_lines, summary
from lineage.checks.policy import worst
from lineage.checks.report import Outcome, Refused, Report
from lineage.checks.verdict import Verdict

_LEFT_OUT = "\nNo more fits into a step summary.\n"
_VERDICTS = ("code", "invariant", "verdict", "examined", "violations", "accepted", "warnings", "needs")
_VIOLATIONS = ("code", "severity", "step", "stage", "op", "field", "key", "expected", "actual", "detail")
_MARKUP = re.compile(r"[\\`*_\[\]|<>&~@:$]")


def render(outcomes: Sequence[Outcome], room: int) -> str:
    """The outcomes as Markdown of so many bytes at most; where it ends early, it says so."""
    written: list[str] = []
    left = room - len(_LEFT_OUT.encode())
    for piece in _pieces(outcomes):
        left -= len(piece.encode())
        if left < 0:
            return "".join([*written, _LEFT_OUT]) if room >= len(_LEFT_OUT) else ""
        written.append(piece)
    return "".join(written)


def escaped(text: str) -> str:
    """The text as code within a line or a cell: every mark that Markdown, HTML or GitHub could read is a reference."""
    return "<code>" + _MARKUP.sub(lambda found: f"&#{ord(found[0])};", plain(text)) + "</code>" if text else ""


def _pieces(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Pieces to cut between, what matters most first."""
    code = worst([one.exit_code for one in outcomes])
    yield f"## lineage check: {code.name.lower()}\n"
    for outcome in outcomes:
        yield from _refused(outcome) if isinstance(outcome, Refused) else _report(outcome)
    for outcome in outcomes:
        if isinstance(outcome, Report) and any(one.violations for one in outcome.verdicts):
            yield f"\n### Violations in {escaped(str(outcome.path))}\n\n{_row(_VIOLATIONS)}{_row(['---'] * 10)}"
            for verdict in outcome.verdicts:
                yield from _violations(verdict)


def _refused(refused: Refused) -> Iterator[str]:
    yield f"\n### {escaped(str(refused.path))}\n\nunusable: {escaped(refused.message)}\n"


def _report(report: Report) -> Iterator[str]:
    yield f"\n### {escaped(str(report.path))}\n"
    if report.headline is not None:
        lines = list(headline_lines(report.headline, report.name))
        ticks = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
        fence = "`" * max(3, ticks + 1)
        yield "\n".join(["", f"{fence}text", *lines, fence, ""])
    if report.state:
        yield f"\nincomplete trace: {escaped(report.state)}; complete steps are judged\n"
    yield from (f"\nfails: {escaped(complaint)}\n" for complaint in report.complaints)
    yield from (f"\nnote: {escaped(note)}\n" for note in report.notes)
    rows = (_verdict(one, report.name(one.code)) for one in report.verdicts)
    yield f"\n{_row(_VERDICTS)}{_row(['---', '---', '---', *['---:'] * 4, '---'])}" + "".join(rows)
    yield f"\n{escaped(summary(report))}\n"


def _verdict(one: Verdict, name: str) -> str:
    said = "**FAIL**" if one.new else one.word
    counts = (f"{number:,}" if number else "" for number in (one.errors, one.accepted, one.warnings))
    return _row([one.code, escaped(name), said, f"{one.examined:,}", *counts, escaped(one.needed)])


def _violations(verdict: Verdict) -> Iterator[str]:
    for one in verdict.violations:
        severity = "accepted" if one.accepted else one.severity
        said = (one.stage, one.op, one.field, one.key or "", one.expected, one.actual, one.detail or "")
        yield _row([verdict.code, severity, str(one.global_steps), *map(escaped, said)])


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"
