"""Text and JSON: what a person and a program read."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import example, given
from made import VIOLATION, failed, report, violations

from lineage.checks.formats import FORMATS, load
from lineage.checks.formats.json import render as render_json
from lineage.checks.formats.plain import plain
from lineage.checks.formats.text import render, to_text
from lineage.checks.policy import Policy


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("quiet", [False, True])
def test_every_format_takes_every_sort_of_trace(form, quiet, judged):
    """One text for all of them together, that names each path, as it is or as a URI."""
    text = load(form).render(list(judged.values()), quiet)
    for one in judged.values():
        assert str(one.path).rsplit("/")[-1] in text


def test_a_format_nobody_knows_is_refused():
    """``load`` imports no module by a name from outside."""
    with pytest.raises(KeyError):
        load("plain")


def test_text_says_why_the_exit_code_is_1_without_a_violation():
    """A required check that saw nothing and too many warnings are lines of their own."""
    warned = failed("KEY001", replace(VIOLATION, severity="warning"))
    one = report(warned, policy=Policy(require={"KEY001": 10}, max_warnings=0))
    assert one.exit_code == 1
    lines = to_text(one, quiet=True).splitlines()
    assert "fails: KEY001 is required to examine 10 facts and examined 9" in lines
    assert "fails: 1 warning, at most 0 let through" in lines


def test_text_says_why_the_exit_code_is_3(judged):
    """The line on the torn step names the option that lets it through, unless it is given."""
    said = "(exit code 3 unless --allow-incomplete)"
    assert said in render([judged["incomplete"]])
    assert said not in render([replace(judged["incomplete"], policy=Policy(allow_incomplete=True))])


def test_a_refused_trace_is_a_line_of_text(judged):
    """Between the reports, as an error."""
    good, missing = render([judged["good"], judged["missing"]]).split("\n\n")
    assert good == to_text(judged["good"])
    assert missing.startswith("error: ")


@given(one=violations)
@example(one=replace(VIOLATION, key="a\nKEY001  forged  pass", expected="\x1b[2J", actual="\ud800"))
def test_any_text_stays_in_its_line(one):
    """A value cannot make up a line or steer a terminal, and is there."""
    plainly = to_text(report(failed("KEY001", replace(VIOLATION, key=None if one.key is None else "k", detail="d"))))
    text = to_text(report(failed("KEY001", replace(one, detail=one.detail or "d"))))
    assert text.count("\n") == plainly.count("\n")
    assert text.replace("\n", "").isprintable()
    for value in (one.key or "", one.expected, one.actual, one.detail or ""):
        assert plain(value) in text


@given(one=violations)
def test_any_text_survives_in_json(one):
    """The first violation has every value as it was, and the file is ASCII."""
    text = render_json([report(failed("KEY001", one))])
    assert text.isascii()
    first = json.loads(text)["verdicts"][0]["first"]
    for name in ("key", "expected", "actual", "detail", "stage", "field"):
        assert first[name] == getattr(one, name)


def test_the_names_in_json_are_stable(judged):
    """A program may rely on these; more may come."""
    said = json.loads(render_json([judged["bad"]]))
    assert set(said) == {
        *("format", "path", "run_id", "profile", "rows", "facts", "steps", "incomplete", "exit_code", "headline"),
        *("verdicts", "complaints", "notes", "seconds"),
    }
    assert set(said["headline"]) == {
        *("code", "name", "says", "causes", "violation", "keys", "violations", "consequences", "change"),
    }
    assert set(said["verdicts"][0]) == {
        *("code", "name", "verdict", "examined", "violations", "accepted", "warnings", "needed", "first"),
    }
    assert set(said["headline"]["violation"]) == {
        *("run_id", "global_steps", "seq", "process", "stage", "op", "field", "key"),
        *("expected", "actual", "detail", "severity", "accepted"),
    }


def test_json_of_several_traces_is_a_list(judged):
    """One object for one trace, refused or not, and a list in the order given for several."""
    several = json.loads(render_json([judged["good"], judged["missing"], judged["incomplete"]]))
    assert [one["exit_code"] for one in several] == [0, 2, 3]
    assert [one["code"] for one in several[0]["verdicts"]] == [one.code for one in judged["good"].invariants]
    assert set(json.loads(render_json([judged["missing"]]))) == {"format", "path", "error", "exit_code"}
    assert several[2]["incomplete"].startswith("step 3 torn")
