"""``lineage faults``: the list, its filters, and what its JSON holds."""

from __future__ import annotations

import json

from lineage.trainer.faults.registry import all_faults
from lineage.trainer.faults.reports import public_reports


def test_every_fault_is_listed_with_its_code_and_stage(command) -> None:
    """A line a fault, then the counts."""
    done = command("faults")
    assert (done.code, done.err) == (0, "")
    head, *body, empty, counts = done.out.splitlines()
    assert head.split()[:3] == ["fault", "code", "stage"]
    assert [tuple(line.split()[:3]) for line in body] == [
        (one.name, one.code, one.stage) for one in all_faults().values()
    ]
    assert empty == ""
    assert counts.startswith(f"{len(all_faults())} faults, ")


def test_the_json_holds_everything(command) -> None:
    """Each fault whole, the reports that are left out with their reasons, the counts."""
    said = json.loads(command("faults", "--json").out)
    assert [one["name"] for one in said["faults"]] == list(all_faults())
    first = said["faults"][0]
    assert {"code", "stage", "kind", "says", "step", "onwards", "overrides", "families", "reports"} <= set(first)
    assert {one["kind"] for one in said["faults"]} <= {"trainer", "trace"}
    left_out = {one.id: one.without for one in public_reports().values() if one.without}
    assert {one["id"]: one["without"] for one in said["left_out"]} == left_out
    assert said["counts"]["faults"] == len(said["faults"])


def test_the_list_is_narrowed_by_code_and_family(command) -> None:
    """``--code`` in any case; ``--family`` is one of public reports."""
    said = json.loads(command("faults", "--code", "que001", "--json").out)
    assert {one["code"] for one in said["faults"]} == {"QUE001"}
    families = {one.family for one in public_reports().values()}
    assert "masks" in families
    said = json.loads(command("faults", "--family", "masks", "--json").out)
    assert all("masks" in one["families"] for one in said["faults"])
    masks = [one for one in public_reports().values() if one.family == "masks"]
    left_out = [one.id for one in masks if one.without]
    assert [one["id"] for one in said["left_out"]] == left_out
    assert (said["counts"]["known"], said["counts"]["left_out"]) == (len(masks), len(left_out))
    assert said["counts"]["families"] == 1


def test_an_unknown_code_or_family_is_one_line(command) -> None:
    """The nearest is named; exit code 2."""
    for arguments, says in ((("--code", "QUE1"), "did you mean"), (("--family", "mask"), "did you mean masks?")):
        done = command("faults", *arguments)
        assert (done.code, done.out) == (2, "")
        assert says in done.err
        assert len(done.err.splitlines()) == 1
