"""A report as GitHub workflow commands, for the log of a job: annotations, after the report as text.

A step shows 10 annotations of each level (actions/toolkit, docs/problem-matchers.md), and of a message the first 4,096
characters (actions/runner, ExecutionContext.cs). So there is one annotation a code, the headline's first, and the whole
goes into the step's summary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lineage.checks.formats import Appendix, step_summary
from lineage.checks.formats.artifact import Artifact
from lineage.checks.formats.plain import plain, plural, shortened
from lineage.checks.formats.text import failure_lines
from lineage.checks.formats.text import render as render_text
from lineage.checks.report import Outcome, Refused, Report
from lineage.checks.verdict import Verdict

LEVELS = ("error", "warning", "notice")
PER_LEVEL = 10
_MESSAGE, _TITLE = 4096, 255

#: the step summary; one of more than 1 MiB is refused as a whole
APPENDIX = Appendix("GITHUB_STEP_SUMMARY", 1024 * 1024, step_summary.render)


@dataclass(frozen=True)
class Annotation:
    """What GitHub shows beside a job.

    Attributes:
        level: ``error``, ``warning`` or ``notice``.
        title: its first line.
        message: the lines below, printable characters and line breaks.
        file: path from the repository's root; empty where the trace is outside.
    """

    level: str
    title: str
    message: str
    file: str = ""

    def __str__(self) -> str:
        """The workflow command, in one line."""
        place = f"file={_property(self.file)},line=1," if self.file else ""
        title = _property(shortened(self.title, _TITLE))
        return f"::{self.level} {place}title={title}::{_data(shortened(self.message, _MESSAGE))}"


def render(outcomes: Sequence[Outcome], quiet: bool = False) -> str:
    """The reports as text, then the annotations, one command a line.

    Args:
        outcomes: of all traces.
        quiet: leave out of the text what passed.
    """
    reports = [one for one in outcomes if isinstance(one, Report)]  # what is refused is an annotation
    said = render_text(reports, quiet).splitlines()
    return "\n".join([*map(_inert, said), *map(str, shown(outcomes))])


def shown(outcomes: Sequence[Outcome]) -> list[Annotation]:
    """The annotations a step can show, errors first; the last of a level stands for those that are left out."""
    found = sorted(_found(outcomes), key=lambda item: item[0])
    kept: list[Annotation] = []
    for level in LEVELS:
        every = [one for _, one in found if one.level == level]
        kept += every if len(every) <= PER_LEVEL else every[: PER_LEVEL - 1]
        if len(every) > PER_LEVEL:
            more = len(every) - PER_LEVEL + 1
            kept.append(Annotation(level, f"lineage: {more} more of these", "The step summary and the log have all."))
    return kept


def _found(outcomes: Sequence[Outcome]) -> Iterator[tuple[int, Annotation]]:
    """All annotations, with a rank: what stops everything, the headlines, what else fails, the rest."""
    for outcome in outcomes:
        file = Artifact.of(outcome.path).file
        if isinstance(outcome, Refused):
            yield 0, Annotation("error", "lineage: unusable trace", plain(outcome.message), file)
        else:
            yield from _of_report(outcome, file)


def _of_report(report: Report, file: str) -> Iterator[tuple[int, Annotation]]:
    head = report.headline
    order = [] if head is None else [head.invariant.code, *(one.code for one in head.consequences)]
    for rank, code in enumerate(order):
        yield min(rank, 1) + 1, _of_code("error", report, report.verdict(code), file)
    for complaint in report.complaints:
        yield 3, Annotation("error", "lineage: the gate does not hold", plain(complaint), file)
    if report.state:
        level = "warning" if report.policy.allow_incomplete else "error"
        said = plain(f"{report.state}; complete steps are judged")
        yield 3, Annotation(level, "lineage: incomplete trace", said, file)
    for verdict in report.verdicts:
        if verdict.warnings and not verdict.errors:
            yield 4, _of_code("warning", report, verdict, file)
    accepted = sum(verdict.accepted for verdict in report.verdicts)
    if accepted:
        codes = ", ".join(verdict.code for verdict in report.verdicts if verdict.accepted)
        yield 4, Annotation("notice", "lineage: accepted", f"{plural(accepted, 'violation')} accepted: {codes}", file)
    for note in report.notes:
        yield 4, Annotation("notice", "lineage", plain(note), file)


def _of_code(level: str, report: Report, verdict: Verdict, file: str) -> Annotation:
    title, *lines = failure_lines(report, verdict)
    return Annotation(level, title, "\n".join(line.removeprefix("  ") for line in lines), file)


def _inert(line: str) -> str:
    """A line of text that the runner cannot take for a command: those start with ``::`` or hold ``##[``."""
    said = line.replace("##[", "#\\x23[")
    return f"\\x3a{said.lstrip()[1:]}" if said.lstrip().startswith("::") else said


def _data(text: str) -> str:
    """The message of a command, as the runner unescapes it: percent sign and line breaks."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """A property of a command: colon and comma as well."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")
