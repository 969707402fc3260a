"""JUnit XML: every reader gets the same cases back, whatever the trace says, and no failed gate is green."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace

from hypothesis import example, given
from junitparser import Error, Failure, JUnitXml, Skipped
from made import VIOLATION, failed, report, reports, violations

from lineage.checks.formats.junit import render
from lineage.checks.formats.plain import plain
from lineage.checks.policy import Policy
from lineage.checks.verdict import Kind, Verdict


def _read(*outcomes):
    return JUnitXml.fromstring(render(outcomes))


def _cases(outcome):
    """Cases of one outcome by code: the result's class and message, or None."""
    (suite,) = _read(outcome)
    return {
        case.name.split()[0]: (type(case.result[0]), case.result[0].message) if case.result else None for case in suite
    }


def test_a_good_trace_passes_every_code(judged):
    """One passed case a code, named by code and name, in a class of the trace and the family."""
    (suite,) = _read(judged["good"])
    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (len(judged["good"].verdicts), 0, 0, 0)
    case = next(one for one in suite if one.name.startswith("MSK002"))
    assert case.name == "MSK002 consumers use the rollout's mask"
    assert case.classname == f"{suite.name}.MSK"
    assert {one.name: one.value for one in suite.properties()}["rows"] == str(judged["good"].rows)


def test_a_note_is_a_property_of_the_trace():
    """What a reader should know beside the cases, such as columns that are not there."""
    (suite,) = _read(report(failed("KEY001"), notes=("without column key",)))
    assert {one.name: one.value for one in suite.properties()}["note"] == "without column key"


def test_a_bad_trace_fails_with_the_headline(judged):
    """The failed code's case holds the whole headline; the others pass."""
    (suite,) = _read(judged["bad"])
    assert (suite.failures, suite.errors) == (1, 0)
    (failure,) = next(one for one in suite if one.name.startswith("MSK002")).result
    assert isinstance(failure, Failure)
    assert failure.message == "MSK002 consumers use the rollout's mask: first broken at step 2, stage update_actor"
    assert f"expected  {judged['bad'].headline.violation.expected}" in failure.text
    assert "usually   The mask was rebuilt" in failure.text


def test_an_incomplete_trace_is_one_error_and_its_codes_are_skipped(judged):
    """Nothing that could not be seen is green, and what is torn is said once."""
    cases = _cases(judged["incomplete"])
    kind, message = cases.pop("trace")
    assert kind is Error
    assert "step 3 torn" in message
    assert {kind for kind, _ in cases.values()} == {Skipped}


def test_an_incomplete_trace_that_is_allowed_is_skipped(judged):
    """--allow-incomplete turns the error into a skip, not into a pass."""
    allowed = replace(judged["incomplete"], policy=Policy(allow_incomplete=True))
    assert {kind for kind, _ in _cases(allowed).values()} == {Skipped}


def test_traces_that_cannot_be_used_are_errors(judged):
    """An empty file and a missing one are suites of their own, with one error each."""
    suites = list(_read(judged["empty"], judged["missing"]))
    assert [(one.tests, one.errors) for one in suites] == [(1, 1), (1, 1)]
    assert "0 rows" in next(iter(suites[0])).result[0].message


def test_several_traces_keep_their_cases_apart(judged):
    """The same trace twice is two suites, and the totals are the sums."""
    root = _read(judged["good"], judged["bad"], judged["bad"])
    assert [one.failures for one in root] == [0, 1, 1]
    assert (root.tests, root.failures) == (3 * len(judged["good"].verdicts), 2)


def test_a_required_code_that_saw_nothing_fails():
    """Vacuous is skipped with its reason; required, it is a failure."""
    vacuous = Verdict("PAD001", Kind.VACUOUS, 0)
    absent = Verdict("TOK001", Kind.NOT_APPLICABLE, 0, needed="field input_ids (never recorded)")
    cases = _cases(report(vacuous, absent))
    assert cases["PAD001"] == (Skipped, "vacuous: nothing to examine")
    assert cases["TOK001"] == (Skipped, "needs field input_ids (never recorded)")
    cases = _cases(report(vacuous, absent, policy=Policy(require={"PAD001": 1})))
    assert cases["PAD001"] == (Failure, "PAD001 is required to examine 1 fact and examined 0")
    assert cases["TOK001"][0] is Skipped


def test_accepted_violations_pass_and_are_listed():
    """A code whose violations are all accepted passes; what was accepted stands in its output."""
    (suite,) = _read(report(failed("KEY001", replace(VIOLATION, accepted=True))))
    (case,) = suite
    assert case.is_passed
    assert "1 violation accepted" in case.system_out
    assert "q_0_0" in case.system_out
    assert case.time == 0.25


def test_too_many_warnings_are_a_case_of_their_own():
    """Warnings over all codes above the threshold fail, though no code does."""
    warned = failed("KEY001", replace(VIOLATION, severity="warning"))
    assert _cases(report(warned))["KEY001"] is None
    cases = _cases(report(warned, policy=Policy(max_warnings=0)))
    assert cases["warnings"] == (Failure, "1 warning, at most 0 let through")


def test_a_long_list_of_violations_is_cut_and_says_so():
    """A failure lists the first twenty."""
    many = [replace(VIOLATION, key=f"q_{at}_0") for at in range(30)]
    (suite,) = _read(report(failed("KEY001", *many)))
    text = next(iter(suite)).result[0].text
    assert "q_19_0" in text
    assert "q_20_0" not in text
    assert text.endswith("the first 20 are listed")


@given(one=violations)
@example(one=replace(VIOLATION, key="\x00\x0b\ud800￾]]>", expected="a\r\nb\t&<\"'", actual="\x85\u2028"))
def test_any_text_survives(one):
    """Both parsers read the file, and find every value in it, what does not print as its escape."""
    text = render([report(failed("KEY001", one), run_id=one.expected, path=one.actual or "x")])
    by_stdlib = ET.fromstring(text).find(".//failure").text
    by_junitparser = next(iter(next(iter(JUnitXml.fromstring(text))))).result[0].text
    assert by_stdlib == by_junitparser
    for value in (one.key or "", one.expected, one.actual, one.detail or ""):
        assert plain(value) in by_stdlib


@given(one=reports())
def test_the_suite_is_red_where_the_gate_is(one):
    """There is a failure or an error exactly where the exit code is not 0."""
    root = _read(one)
    assert bool(root.failures + root.errors) == (one.exit_code != 0)
