"""``lineage faults``: the list, its filters, and what its JSON holds."""

from __future__ import annotations

import json

import pytest

from lineage.trainer.faults.registry import all_faults
from lineage.trainer.faults.reports import public_reports

EVERY = [*all_faults().values(), *all_faults("ray").values()]


@pytest.mark.parametrize("columns", [40, 80, 100, 300])
def test_every_fault_is_listed_with_its_code_and_stage(command, monkeypatch, columns) -> None:
    """A line a fault that can be searched for, what goes wrong under it, then the counts; 80 to 120 columns wide."""
    monkeypatch.setenv("COLUMNS", str(columns))
    done = command("faults")
    assert (done.code, done.err) == (0, "")
    *body, empty, counts = done.out.splitlines()
    heads = [line for line in body if not line.startswith(" ")]
    assert [tuple(line.split()[:3]) for line in heads] == [(one.code, one.stage, one.name) for one in EVERY]
    assert [line.endswith("(mode=ray)") for line in heads] == [one.mode == "ray" for one in EVERY]
    assert max(map(len, body)) <= min(max(columns, 80), 120)
    assert empty == ""
    assert counts.startswith(f"{len(EVERY)} faults of ")
    assert f"of {len(public_reports())} public reports; " in counts


def test_one_of_a_kind_is_no_plural(command) -> None:
    """``1 fault of 1 code``; reports that no fault stands for are of no code."""
    lines = {code: command("faults", "--code", code).out.splitlines()[-1] for code in ("QUE006", "QUE001")}
    counts = {code: sum(code in (one.code, *one.also) for one in EVERY) for code in lines}
    for code, line in lines.items():
        assert line.startswith("1 fault of 1 code, " if counts[code] == 1 else f"{counts[code]} faults of 1 code, ")
        assert "left out" not in line


def test_the_json_holds_everything(command) -> None:
    """Each fault whole, the reports that are left out with their reasons, the counts."""
    said = json.loads(command("faults", "--json").out)
    assert [one["name"] for one in said["faults"]] == [one.name for one in EVERY]
    first = said["faults"][0]
    assert {"code", "stage", "kind", "says", "step", "onwards", "overrides", "report_families", "reports"} <= set(first)
    assert {one["kind"] for one in said["faults"]} <= {"trainer", "trace"}
    left_out = {one.id: one.without for one in public_reports().values() if one.without}
    assert {one["id"]: one["without"] for one in said["left_out"]} == left_out
    assert said["counts"]["faults"] == len(said["faults"])


def test_the_list_is_narrowed_by_code_and_family(command) -> None:
    """``--code`` in any case, or a family of codes; ``--family`` is one of public reports."""
    said = json.loads(command("faults", "--code", "que001", "--json").out)
    assert {one["code"] for one in said["faults"]} == {"QUE001"}
    said = json.loads(command("faults", "--code", "msk", "--json").out)
    assert {one["code"][:3] for one in said["faults"]} == {"MSK"}
    families = {one.family for one in public_reports().values()}
    assert "masks" in families
    said = json.loads(command("faults", "--family", "masks", "--json").out)
    assert all("masks" in one["report_families"] for one in said["faults"])
    masks = [one for one in public_reports().values() if one.family == "masks"]
    left_out = [one.id for one in masks if one.without]
    assert [one["id"] for one in said["left_out"]] == left_out
    assert (said["counts"]["known"], said["counts"]["left_out"]) == (len(masks), len(left_out))
    assert said["counts"]["report_families"] == 1


def test_an_unknown_code_or_family_is_one_line(command) -> None:
    """The nearest is named; exit code 2."""
    for arguments, says in (
        (("--code", "QUE1"), "did you mean"),
        (("--family", "mask"), "did you mean masks?"),
        (("--family", "MSK"), "a family of codes: lineage faults --code MSK"),
    ):
        done = command("faults", *arguments)
        assert (done.code, done.out) == (2, "")
        assert says in done.err
        assert len(done.err.splitlines()) == 1
