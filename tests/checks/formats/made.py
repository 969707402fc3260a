"""Reports made by hand, for what no sample shows: any text in a violation, many codes, acceptance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from lineage.checks.blame import headline
from lineage.checks.catalogue import Invariant, catalogue
from lineage.checks.policy import Policy
from lineage.checks.profiles import load
from lineage.checks.report import Report
from lineage.checks.verdict import Kind, Site, Verdict, Violation

VIOLATION = Violation(
    run_id="run",
    global_steps=2,
    seq=7,
    process="driver",
    stage="update_actor",
    op="forward",
    field="log_probs",
    key="q_0_0",
    expected="mask sum 4",
    actual="mask sum 3",
    detail="smaller",
    severity="error",
    ord=7,
)


def failed(code: str, *violations: Violation, **changed: Any) -> Verdict:
    """A verdict with these violations, all of them counted."""
    errors = [one for one in violations if one.severity == "error"]
    verdict = Verdict(
        code,
        Kind.FAIL if errors else Kind.PASS,
        examined=9,
        errors=len(errors),
        warnings=len(violations) - len(errors),
        accepted=sum(one.accepted for one in violations),
        violations=violations,
        sites=tuple(Site(one.stage, one.op, one.field, 1) for one in errors),
        seconds=0.25,
    )
    return replace(verdict, **changed)


def report(*verdicts: Verdict, invariants: tuple[Invariant, ...] = (), **changed: Any) -> Report:
    """A report of these verdicts; their invariants are the catalogue's, unless given."""
    known = {one.code: one for one in (*catalogue(), *invariants)}
    chosen = tuple(known[one.code] for one in verdicts)
    made = Report(
        path="runs/a/trace.parquet",
        run_id="run",
        profile=load("lineage"),
        rows=10,
        facts=90,
        steps=2,
        state="",
        verdicts=verdicts,
        invariants=chosen,
        headline=headline(verdicts, chosen),
        seconds=1.5,
        policy=Policy(),
    )
    return replace(made, **changed)


#: any text a trace or a path could hold, lone surrogates and control characters too
anything = st.text(st.characters(), max_size=40)
violations = st.builds(
    replace,
    st.just(VIOLATION),
    key=st.none() | anything,
    expected=anything,
    actual=anything,
    detail=st.none() | anything,
    stage=anything,
    field=anything,
)


@st.composite
def reports(draw: st.DrawFn) -> Report:
    """Any mixture of verdicts, complete or not, under any policy but ``exit_zero``."""
    state = draw(st.sampled_from(["", "step 3 torn"]))
    verdicts = []
    for one in catalogue()[:4]:
        errors = [
            replace(VIOLATION, key=f"q_{at}_0", accepted=accepted)
            for at, accepted in enumerate(draw(st.lists(st.booleans(), max_size=3)))
        ]
        warnings = [replace(VIOLATION, severity="warning")] * draw(st.integers(0, 1))
        quiet = Kind.INCOMPLETE if state else draw(st.sampled_from([Kind.PASS, Kind.VACUOUS, Kind.NOT_APPLICABLE]))
        examined = 9 if errors or warnings or quiet in (Kind.PASS, Kind.INCOMPLETE) else 0
        kind = Kind.FAIL if errors else quiet
        verdicts.append(failed(one.code, *errors, *warnings, kind=kind, examined=examined, needed=state))
    policy = Policy(
        require=draw(st.dictionaries(st.sampled_from([one.code for one in verdicts]), st.integers(1, 20), max_size=2)),
        max_warnings=draw(st.none() | st.integers(0, 2)),
        allow_incomplete=draw(st.booleans()),
    )
    return report(*verdicts, state=state, policy=policy)
