"""SARIF: valid by the schema whatever was judged, the same fault the same alert, and nothing unseen passed over."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import jsonschema
import pytest
from hypothesis import example, given, settings
from made import VIOLATION, failed, report, reports, violations

from lineage.checks.catalogue import catalogue
from lineage.checks.formats.fingerprints import fingerprints
from lineage.checks.formats.sarif import render, to_dict
from lineage.checks.policy import Policy
from lineage.checks.report import Refused

SCHEMA = Path(__file__).parents[2] / "schemas" / "sarif-2.1.0.json"


@cache
def _schema() -> jsonschema.Draft4Validator:
    return jsonschema.Draft4Validator(json.loads(SCHEMA.read_text("utf-8")))


def _run(*outcomes, **options):
    """The one run of the log, after a trip through JSON and the schema."""
    log = json.loads(json.dumps(to_dict(outcomes, **options)))
    _schema().validate(log)
    (run,) = log["runs"]
    return run


def test_the_schema_refuses_what_is_not_sarif():
    """The validator the other tests rely on can fail."""
    with pytest.raises(jsonschema.ValidationError):
        _schema().validate({"version": "2.1.0", "runs": [{"results": []}]})


@pytest.mark.parametrize("name", ["good", "bad", "incomplete", "empty", "missing"])
def test_every_sort_of_trace_gives_a_valid_log(name, judged):
    """As rendered, it parses, is valid, and says the exit code."""
    log = json.loads(render([judged[name]]))
    _schema().validate(log)
    invocation = log["runs"][0]["invocations"][0]
    assert invocation["exitCode"] == int(judged[name].exit_code)
    assert invocation["executionSuccessful"] == (name in ("good", "bad"))


def test_only_violations_are_results_and_every_verdict_is_kept(judged):
    """A pass is no result, because GitHub would show it as an alert; its examined count is in the properties."""
    run = _run(judged["good"], judged["bad"], judged["missing"])
    assert {one["ruleId"] for one in run["results"]} == {"MSK002"}
    good, bad, missing = run["properties"]["traces"]
    assert {one["code"] for one in good["verdicts"]} == {one.code for one in judged["good"].invariants}
    assert all(one["examined"] > 0 for one in good["verdicts"])
    counts = {one["code"]: one["violations"] for one in bad["verdicts"]}
    assert counts == {one.code: one.errors for one in judged["bad"].verdicts}
    assert "no such file" in missing["error"]


def test_a_result_says_what_github_shows(judged):
    """Rule, level, message, place: the trace from the current folder, line 1, and the event by name."""
    run = _run(judged["bad"])
    result, *_ = run["results"]
    rule = run["tool"]["driver"]["rules"][result["ruleIndex"]]
    assert (result["ruleId"], result["level"]) == (rule["id"], "error") == ("MSK002", "error")
    assert result["message"]["text"].startswith(
        "consumers use the rollout's mask: broken at step 2, stage update_actor"
    )
    assert f"Expected {judged['bad'].headline.violation.expected}" in result["message"]["text"]
    (location,) = result["locations"]
    assert location["physicalLocation"]["region"]["startLine"] == 1
    names = [one["fullyQualifiedName"] for one in location["logicalLocations"]]
    assert names == [
        "step 2/update_actor/forward/log_probs",
        f"step 2/update_actor/forward/log_probs/{result['properties']['key']}",
    ]
    assert "suppressions" not in result
    assert "baselineState" not in result


def test_rules_carry_their_help(judged):
    """One descriptor an invariant that was run, with what GitHub requires of one."""
    rules = _run(judged["good"])["tool"]["driver"]["rules"]
    assert [one["id"] for one in rules] == [one.code for one in judged["good"].invariants]
    for rule, invariant in zip(rules, judged["good"].invariants, strict=True):
        assert rule["fullDescription"]["text"] == invariant.says
        assert invariant.causes in rule["help"]["markdown"]
        assert invariant.family in rule["properties"]["tags"]
        assert rule["defaultConfiguration"]["level"] == invariant.severity


def test_what_no_result_can_say_is_a_notification(judged):
    """A refused trace, an incomplete one, a required check that saw too little, and a note."""
    lacking = report(failed("KEY001"), policy=Policy(require={"KEY001": 10}), notes=("2 are gone",))
    run = _run(judged["missing"], judged["incomplete"], lacking)
    said = [(one["level"], one["message"]["text"]) for one in run["invocations"][0]["toolExecutionNotifications"]]
    assert [level for level, _ in said] == ["error", "error", "error", "note"]
    for part, (_, text) in zip(
        ("no such file", "step 3 torn", "required to examine 10", "2 are gone"), said, strict=True
    ):
        assert part in text
    assert run["invocations"][0]["exitCodeDescription"] == "unusable"


def test_an_incomplete_trace_that_is_allowed_only_warns(judged):
    """--allow-incomplete leaves a warning, and the execution counts as successful."""
    run = _run(replace(judged["incomplete"], policy=Policy(allow_incomplete=True)))
    (invocation,) = run["invocations"]
    assert invocation["executionSuccessful"]
    assert [one["level"] for one in invocation["toolExecutionNotifications"]] == ["warning"]


def test_accepted_violations_are_suppressed_and_unchanged():
    """Accepted: a note, suppressed from outside, unchanged; beside it, what is not accepted is new."""
    new, old = replace(VIOLATION, key="new"), replace(VIOLATION, key="old", accepted=True)
    first, second = _run(report(failed("KEY001", old, new)))["results"]
    assert (first["properties"]["key"], first["level"], first["baselineState"]) == ("new", "error", "new")
    assert (second["level"], second["baselineState"]) == ("note", "unchanged")
    assert [one["kind"] for one in second["suppressions"]] == ["external"]


def test_the_same_fault_has_the_same_fingerprints_in_every_run():
    """Run, step, sequence and values do not count; code, stage, op, field and key do."""
    one = fingerprints("MSK002", VIOLATION)
    again = replace(VIOLATION, run_id="b", seq=99, global_steps=5, process="actor:1", expected="1", actual="2", ord=99)
    assert fingerprints("MSK002", again) == one
    others = [fingerprints("MSK001", VIOLATION)]
    others += [
        fingerprints("MSK002", replace(VIOLATION, **{name: "other"})) for name in ("stage", "op", "field", "key")
    ]
    assert len({each["primaryLocationLineHash"] for each in (one, *others)}) == 6
    assert len({each["placeHash/v1"] for each in (one, *others)}) == 5  # the key is no part of it


def test_fingerprints_never_change():
    """A change would close every alert of every user and open it anew."""
    assert fingerprints("MSK002", VIOLATION) == {
        "primaryLocationLineHash": "c4687714677bc8c7",
        "keyHash/v1": "c4687714677bc8c7",
        "placeHash/v1": "c1e96b9bcf3fedf0",
    }


def test_one_fault_at_one_place_is_one_result():
    """The same key at the same place, step after step, is counted, not repeated."""
    again = replace(VIOLATION, global_steps=3, seq=70, ord=70)
    run = _run(report(failed("KEY001", VIOLATION, again, replace(VIOLATION, key=None))))
    assert [(one["properties"]["key"], one["occurrenceCount"]) for one in run["results"]] == [("q_0_0", 2), (None, 1)]
    assert [one["properties"]["step"] for one in run["results"]] == [2, 2]
    assert run["invocations"][0]["toolExecutionNotifications"] == []


def test_a_run_is_capped_with_the_headline_first_and_says_so():
    """Within the limit every code has its first violation before any has its second; what is left out is a note."""
    late = [replace(VIOLATION, key=f"late_{at}", ord=50) for at in range(3)]
    early = [replace(VIOLATION, key=f"early_{at}", ord=5) for at in range(3)]
    run = _run(report(failed("KEY001", *late), failed("TOK001", *early)), limit=3)
    assert [one["properties"]["key"] for one in run["results"]] == ["early_0", "early_1", "late_0"]
    said = [one["message"]["text"] for one in run["invocations"][0]["toolExecutionNotifications"]]
    assert said == [
        "KEY001: 3 violations in runs/a/trace.parquet, 1 of them in the results",
        "TOK001: 3 violations in runs/a/trace.parquet, 2 of them in the results",
    ]


def test_violations_beyond_those_a_report_keeps_are_said_to_be_missing():
    """A report keeps a thousand a code; the note has the whole number."""
    run = _run(report(failed("KEY001", VIOLATION, errors=5000)))
    (note,) = run["invocations"][0]["toolExecutionNotifications"]
    assert "5,000 violations" in note["message"]["text"]


def test_a_users_own_invariant_without_much_of_a_header_is_valid():
    """GitHub takes no empty description, so what a header leaves out is said to be left out."""
    own = replace(catalogue()[0], code="MINE001", causes="", source="", says="", needs=(), fields=())
    (rule,) = _run(report(failed("MINE001", VIOLATION), invariants=(own,)))["tool"]["driver"]["rules"]
    assert rule["fullDescription"]["text"] == own.name
    assert "Usually: not written down" in rule["help"]["text"]


def test_uploads_of_one_job_share_a_category():
    """GitHub replaces an older analysis by one of the same category; the run is only stored."""
    assert _run(report(failed("KEY001")))["automationDetails"]["id"] == "lineage-check/run"
    assert _run(report(failed("KEY001")), report(failed("KEY001")))["automationDetails"]["id"] == "lineage-check/"


def test_a_trace_at_a_url_is_relative_to_a_base():
    """GitHub refuses absolute URIs of another scheme than the checkout's."""
    run = _run(Refused("s3://bucket/runs/a b/trace.parquet", "no access"))
    (artifact,) = run["artifacts"]
    assert artifact["location"] == {"uri": "runs/a%20b/trace.parquet", "uriBaseId": "s3://bucket/"}
    assert run["originalUriBaseIds"] == {"s3://bucket/": {"uri": "s3://bucket/"}}


@settings(max_examples=40)
@given(one=violations)
@example(one=replace(VIOLATION, key="\x00\ud800", stage="a/b%[x](1)", expected="{0}", actual="\r\n"))
def test_any_text_survives(one):
    """The log stays valid, and the properties hold every value as it was."""
    (result,) = _run(report(failed("KEY001", one)))["results"]
    for name in ("key", "expected", "actual", "detail", "stage", "field"):
        assert result["properties"][name] == getattr(one, name)


@given(one=reports())
def test_something_is_an_error_where_the_gate_fails(one):
    """An error in results or notifications, or no success, exactly where the exit code is not 0."""
    (run,) = to_dict([one])["runs"]
    (invocation,) = run["invocations"]
    levels = {each["level"] for each in (*run["results"], *invocation["toolExecutionNotifications"])}
    assert ("error" in levels or not invocation["executionSuccessful"]) == (one.exit_code != 0)
