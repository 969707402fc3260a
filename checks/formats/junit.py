"""A report as JUnit XML: a test suite a trace, a test case a code, for the test view that every CI system has.

Such a view knows four states. ``passed``: a pass, and violations that are all accepted. ``failure``: violations that
are not, and a required check that saw too little. ``skipped``: what could not be seen. ``error``: a trace that could
not be used, or is incomplete and not allowed to be: the case ``trace`` says so once, and the codes it leaves open are
skipped. So no run is green whose exit code is not 0.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from lineage.checks.catalogue import get
from lineage.checks.formats.plain import plain, plural, shortened
from lineage.checks.formats.text import failure_lines
from lineage.checks.report import Outcome, Refused, Report
from lineage.checks.verdict import Kind, Verdict, Violation

#: violations listed in one failure; a test view shows its text as a whole
_LISTED = 20
#: characters of a message, which the views show in a row of a table
_MESSAGE = 500


def render(outcomes: Sequence[Outcome], quiet: bool = False) -> str:
    """The outcomes as one XML document, in ASCII.

    Args:
        outcomes: of all traces.
        quiet: makes no difference here.
    """
    root = JUnitXml("lineage check")
    for outcome in outcomes:
        root.append(_refused(outcome) if isinstance(outcome, Refused) else _suite(outcome))
    root.update_statistics()
    written = io.BytesIO()
    root.write(written, pretty=True)
    return written.getvalue().decode("utf-8").rstrip("\n").encode("ascii", "xmlcharrefreplace").decode("ascii")


def _refused(refused: Refused) -> TestSuite:
    name = plain(str(refused.path))
    suite = TestSuite(name)
    suite.add_testcase(_case("trace", name, Error(_message(refused.message), "unusable")))
    return suite


def _suite(report: Report) -> TestSuite:
    name = plain(str(report.path))
    suite = TestSuite(name)
    said = {
        "run_id": report.run_id,
        "profile": report.profile.name,
        "rows": report.rows,
        "facts": report.facts,
        "steps": report.steps,
        "exit_code": int(report.exit_code),
    }
    for key, value in said.items():
        suite.add_property(key, plain(str(value)))
    for note in report.notes:
        suite.add_property("note", plain(note))
    suite.add_testcases([*_of_the_trace(report, name), *(_of_a_code(report, one, name) for one in report.verdicts)])
    suite.time = round(report.seconds, 3)
    return suite


def _of_the_trace(report: Report, name: str) -> Iterator[TestCase]:
    """What is wrong with the whole of it; nothing when nothing is."""
    if report.state or any(one.kind is Kind.INCOMPLETE for one in report.verdicts):
        message = _message(f"incomplete trace: {report.state}; complete steps are judged")
        allowed = report.policy.allow_incomplete
        yield _case("trace", name, Skipped(message, "incomplete") if allowed else Error(message, "incomplete"))
    for complaint in replace(report.policy, require={}).complaints(report.verdicts):
        yield _case("warnings", name, Failure(_message(complaint), "warnings"))


def _of_a_code(report: Report, verdict: Verdict, name: str) -> TestCase:
    # the class is the trace and the family: views that know no suites keep the traces of one job apart by it
    invariant = get(verdict.code, report.invariants)
    case = _case(plain(f"{invariant.code} {invariant.name}"), f"{name}.{invariant.family}")
    case.time = round(verdict.seconds, 3)
    lacking = list(replace(report.policy, max_warnings=None).complaints([verdict]))
    if verdict.new:
        new = [one for one in verdict.violations if one.severity == "error" and not one.accepted]
        lines = [*failure_lines(report, verdict), *(_listed(verdict, new) if verdict.new > 1 else ())]
        failure = Failure(_message(lines[0]), verdict.code)
        failure.text = "\n".join(lines)
        case.result = [failure]
    elif lacking:
        case.result = [Failure(_message(lacking[0]), "required")]
    elif verdict.kind in (Kind.NOT_APPLICABLE, Kind.VACUOUS, Kind.INCOMPLETE):
        case.result = [Skipped(_message(_why(verdict)), verdict.kind.value)]
    said = [f"{verdict.examined:,} examined"]
    if verdict.accepted:
        said.append(f"{plural(verdict.accepted, 'violation')} accepted")
        said += _listed(verdict, [one for one in verdict.violations if one.accepted])
    if verdict.warnings:
        said.append(plural(verdict.warnings, "warning"))
        said += _listed(verdict, [one for one in verdict.violations if one.severity == "warning"])
    case.system_out = "\n".join(said)
    return case


def _why(verdict: Verdict) -> str:
    """Why nothing can be said."""
    if verdict.kind is Kind.VACUOUS:
        return "vacuous: nothing to examine"
    if verdict.kind is Kind.INCOMPLETE:
        return f"incomplete: {verdict.needed}; no violation in the complete steps"
    return f"needs {verdict.needed}"


def _listed(verdict: Verdict, violations: Sequence[Violation]) -> Iterator[str]:
    for one in violations[:_LISTED]:
        where = f"step {one.global_steps}, {one.stage}, {one.op} {one.field}"
        key = f", {one.key}" if one.key is not None else ""
        detail = f" ({one.detail})" if one.detail else ""
        yield plain(f"{verdict.code} {where}{key}: expected {one.expected}, got {one.actual}{detail}")
    if len(violations) > _LISTED:
        yield f"the first {_LISTED} are listed"


def _case(name: str, classname: str, result: Error | Failure | Skipped | None = None) -> TestCase:
    case = TestCase(name, classname, 0.0)
    if result is not None:
        case.result = [result]
    return case


def _message(text: str) -> str:
    return shortened(plain(text), _MESSAGE)
