"""The registry of faults: every fault can be injected, stands for something, and every code has one.

Their proof is ``lineage selftest``, which injects each and asks the catalogue.
"""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name

import pytest

from lineage.checks.catalogue import catalogue
from lineage.trainer.faults.clean import NAMED, clean_configurations
from lineage.trainer.faults.registry import INCOMPLETE, Fault, FaultError, all_faults, fault, find_fault
from lineage.trainer.faults.reports import public_reports
from lineage.vocabulary import STAGES

FAULTS = all_faults()
BETWEEN_PROCESSES = all_faults("ray")
EVERY = FAULTS | BETWEEN_PROCESSES
REPORTS = public_reports()
FAMILIES = 17


@pytest.mark.parametrize("one", EVERY.values(), ids=list(EVERY))
def test_a_fault_says_what_went_wrong_and_where(one: Fault) -> None:
    """A sentence that ends, a stage of the step, a code of the catalogue, and one way to be injected."""
    assert one.says.endswith(".")
    assert one.stage in (*STAGES, "postprocess")  # a stage of the user's own is legal too
    assert one.code in {INCOMPLETE, *(invariant.code for invariant in catalogue())}
    assert (one.seams is None) != (one.edit is None)
    assert one.name.isidentifier()


@pytest.mark.parametrize("one", [one for one in EVERY.values() if one.seams], ids=lambda one: one.name)
def test_a_fault_s_seams_exist(one: Fault) -> None:
    """Every dotted name it replaces is there to be replaced, and its replacement can be called."""
    assert one.seams is not None
    seams = one.seams()
    assert seams
    for name, replacement in seams.items():
        assert resolve_name(name) is not None, name
        assert callable(replacement), name


def test_faults_between_processes_are_of_the_other_mode() -> None:
    """What exists between processes is injected into a run of processes; nothing else is, and both are found."""
    assert {"rank_dies", "key_lost_in_dispatch"} <= set(BETWEEN_PROCESSES)
    assert set(FAULTS).isdisjoint(BETWEEN_PROCESSES)
    assert all(one.mode == "ray" and "mode=ray" in one.overrides for one in BETWEEN_PROCESSES.values())
    assert all(one.mode == "embedded" and one.code != INCOMPLETE for one in FAULTS.values())
    assert find_fault("rank_dies") is BETWEEN_PROCESSES["rank_dies"]
    assert find_fault("stale-tied-head") is BETWEEN_PROCESSES["stale_tied_head"]


def test_every_report_a_fault_names_is_known() -> None:
    """An id that no file of reports holds stands for nothing."""
    assert {name for one in FAULTS.values() for name in one.reports} <= set(REPORTS)


def test_every_report_has_a_fault_or_a_reason() -> None:
    """Each public report is stood for by a fault, or says why no fault of a trace can; never both."""
    stood_for = {name for one in FAULTS.values() for name in one.reports}
    assert {name for name, one in REPORTS.items() if not one.without} == stood_for


def test_the_faults_cover_every_family_and_every_code() -> None:
    """At least a hundred, over all families of reports, one or more for each code."""
    assert len({one.family for one in REPORTS.values()}) == FAMILIES
    assert {REPORTS[name].family for one in FAULTS.values() for name in one.reports} == {
        one.family for one in REPORTS.values()
    }
    shown = {code for one in FAULTS.values() for code in (one.code, *one.also)}
    assert shown == {invariant.code for invariant in catalogue()}
    assert len(FAULTS) >= 100


def test_every_fault_s_configuration_is_tried_clean() -> None:
    """What a fault is injected into is clean without it: each set of overrides is a clean configuration."""
    tried = set(clean_configurations().values())
    assert {one.overrides for one in FAULTS.values()} <= tried
    assert set(NAMED) <= set(clean_configurations())


def test_a_name_is_taken_once_and_a_fault_has_a_sentence() -> None:
    """Two faults of one name, or one that says nothing, are refused where they are written."""
    name = next(iter(FAULTS))

    def nothing() -> dict[str, object]:
        return {}

    with pytest.raises(FaultError, match="has no sentence"):
        fault("KEY001", "rollout")(nothing)
    nothing.__doc__, nothing.__name__ = "Something goes wrong.", name
    with pytest.raises(FaultError, match="its name is taken"):
        fault("KEY001", "rollout")(nothing)


def test_an_unknown_fault_is_one_line_with_the_nearest() -> None:
    """A slip of the fingers is answered with the name that was meant."""
    name = next(iter(FAULTS))
    with pytest.raises(FaultError, match=f"did you mean {name}"):
        find_fault(f"{name}x")


def test_the_headers_of_the_invariants_are_the_faults_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports and faults of every invariant file are written from here: ``python scripts/write_reports.py``."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    import write_reports

    assert [file.name for file in write_reports.stale()] == []
    text = "-- code: KEY001\n-- causes: none.\n-- reports: old\nselect 1\n"
    made = write_reports.with_headers(text, {"reports": ["b/c#1"], "faults": []})
    assert made == "-- code: KEY001\n-- causes: none.\n-- reports: b/c#1\nselect 1\n"
