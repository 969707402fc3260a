"""A baseline accepts what is known, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from faults import FAULTS, change, pick
from hypothesis import given
from hypothesis import strategies as st

from lineage.checks import ExitCode, Kind, Verdict, Violation, check
from lineage.checks.baseline import Baseline, BaselineError
from lineage.checks.policy import Match
from lineage.checks.verdict import Site

SOME = ["ADV001", "KEY001", "TOK001"]
_PLACES = (("rollout", "produce", "responses"), ("update_actor", "consume", "responses"))


def _violation(place: tuple[str, str, str], step: int, key: str | None, severity: str = "error") -> Violation:
    stage, op, field = place
    return Violation("run", step, 1, "driver", stage, op, field, key, "1", "2", None, severity, step)


def _verdict(violations: list[Violation], unlisted: int = 0) -> Verdict:
    """A verdict that lists these, and has ``unlisted`` more at the first place."""
    errors = [one for one in violations if one.severity == "error"]
    counts = {place: sum((one.stage, one.op, one.field) == place for one in errors) for place in _PLACES}
    counts[_PLACES[0]] += unlisted
    sites = tuple(Site(*place, count) for place, count in counts.items() if count)
    return Verdict("LEN001", Kind.FAIL, 9, len(errors) + unlisted, 0, tuple(violations), sites)


class _Report:
    """As much of a report as a baseline reads."""

    def __init__(self, *verdicts: Verdict) -> None:
        self.verdicts = verdicts


violations = st.lists(
    st.builds(_violation, st.sampled_from(_PLACES), st.integers(1, 3), st.sampled_from(["a_0_0", "a_0_1", None])),
    max_size=8,
)


@given(violations, st.integers(0, 3), st.sampled_from(Match))
def test_a_baseline_accepts_the_report_it_was_made_of(found, unlisted, match):
    """Whatever the violations, and also those a report only counts."""
    verdict = _verdict(found, unlisted)
    accepted = Baseline.of([_Report(verdict)], match).accept(verdict)
    assert (accepted.new, accepted.kind) == (0, Kind.FAIL)
    assert all(one.accepted for one in accepted.violations)


@given(violations, violations)
def test_one_more_violation_is_one_new_one(found, others):
    """By key, exactly those that were not there before are new, each known one counting once."""
    baseline = Baseline.of([_Report(_verdict(found))])
    accepted = baseline.accept(_verdict(found + others))
    assert accepted.new == len(others)


@given(violations, st.sampled_from(Match))
def test_a_baseline_file_is_read_back_as_it_was(tmp_path_factory, found, match):
    """Saving and loading change nothing that acceptance rests on."""
    path = tmp_path_factory.mktemp("baseline") / "baseline.json"
    made = Baseline.of([_Report(_verdict(found))], match)
    made.save(path)
    assert json.loads(path.read_text())["match"] == match
    assert Baseline.load(path).accept(_verdict(found)) == made.accept(_verdict(found))


def test_another_trajectory_at_a_known_place_is_new():
    """A known place does not excuse a key that was right yesterday."""
    known = _violation(_PLACES[0], 1, "a_0_0")
    accepted = Baseline.of([_Report(_verdict([known]))]).accept(_verdict([replace(known, key="b_0_0")]))
    assert accepted.new == 1


def test_by_site_keys_do_not_matter_and_more_of_them_do():
    """Where uids are random, so many violations of a place are known, whichever their keys."""
    known = _violation(_PLACES[0], 1, "a_0_0")
    baseline = Baseline.of([_Report(_verdict([known]))], Match.SITE)
    other = replace(known, key="b_0_0")
    assert baseline.accept(_verdict([other])).new == 0
    assert baseline.accept(_verdict([known, other])).new == 2
    assert baseline.accept(_verdict([_violation(_PLACES[1], 1, "a_0_0")])).new == 1


def test_warnings_are_neither_kept_nor_accepted():
    """A warning changes no exit code, so there is nothing to accept."""
    warning = _violation(_PLACES[0], 1, "a_0_0", "warning")
    baseline = Baseline.of([_Report(_verdict([warning]))])
    assert baseline.known == {}
    assert not baseline.accept(_verdict([warning])).violations[0].accepted


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 1, "match": "key", "violations": [{"code": 1}]}', '{"format": 9}']
)
def test_a_file_that_is_no_baseline_is_refused(tmp_path, text):
    """One line, which names the file."""
    path = tmp_path / "baseline.json"
    path.write_text(text)
    with pytest.raises(BaselineError, match="baseline"):
        Baseline.load(path)


def test_a_known_violation_passes_and_a_new_one_leads_the_report(rows, write, tmp_path):
    """Yesterday's violation is accepted by today's run; a new one fails and is the headline."""
    FAULTS["TOK001"][0](rows)
    path = tmp_path / "baseline.json"
    yesterday = check(write(rows, "yesterday.parquet"), select=SOME)
    assert yesterday.exit_code == ExitCode.VIOLATIONS
    Baseline.of([yesterday]).save(path)
    today = check(write(rows, "today.parquet"), select=SOME, baseline=path)
    assert (today.exit_code, today.headline, today.verdict("TOK001").kind) == (ExitCode.PASS, None, Kind.FAIL)
    assert today.violations.filter("accepted").shape[0] == today.verdict("TOK001").errors

    change(pick(rows, "advantage", "forward", "advantages", step=3), "nnz_out", 0, 1)
    worse = check(write(rows, "worse.parquet"), select=SOME, baseline=path)
    assert worse.exit_code == ExitCode.VIOLATIONS
    assert worse.headline is not None
    assert worse.headline.invariant.code == "ADV001"
    assert "TOK001" not in [one.code for one in worse.headline.consequences]


def test_what_did_not_happen_again_is_said(rows, write, tmp_path):
    """A baseline that is too generous says so, and how to mend it."""
    FAULTS["TOK001"][0](rows)
    path = tmp_path / "baseline.json"
    Baseline.of([check(write(rows), select="TOK001")]).save(path)
    kept = [row for row in rows if row.scalars.get("global_steps", 0) != 2]
    (note,) = check(write(kept, "other.parquet"), select="TOK001", baseline=path).notes
    assert "1 known violation did not occur: --update-baseline forgets it" in note


def test_a_torn_trace_with_accepted_violations_is_still_incomplete(rows, write, tmp_path):
    """Accepting a violation does not show what was lost."""
    FAULTS["TOK001"][0](rows)
    path = tmp_path / "baseline.json"
    torn = write(rows, state={"torn": [3], "closed": False})
    Baseline.of([check(torn, select="TOK001")]).save(path)
    assert check(torn, select="TOK001", baseline=path).exit_code == ExitCode.INCOMPLETE
    assert check(torn, select="TOK001", baseline=path, allow_incomplete=True).exit_code == ExitCode.PASS
