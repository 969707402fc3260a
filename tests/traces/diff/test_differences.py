"""Each way to differ, by its name, and the event at which two traces part first."""

from __future__ import annotations

import copy

import pyarrow as pa
import pyarrow.parquet as pq
from two_steps import aspects_of, shuffled

from lineage.traces.diff import diff


def test_the_first_of_several_is_the_first_event(trace, rows):
    """Rows may be stored in any order: the earliest event that parts is the headline, and content before form."""
    wrote = [number for number, row in enumerate(rows) if row["field"] == "responses" and row["op"] == "produce"]
    read = [number for number, row in enumerate(rows) if row["field"] == "responses" and row["op"] == "consume"]
    changed = copy.deepcopy(rows)
    for number in (wrote[-1], read[-1], wrote[0]):
        changed[number]["valid_length"][1] += 1
    changed[0]["producer"] = "another"
    found = diff(trace(), trace("b", changed[::-1]))
    assert (found.first.aspect, found.first.a.seq) == ("length", rows[wrote[0]]["seq"])
    assert found.first.key == rows[wrote[0]]["key"][1]
    assert [one.a.seq for one in found.differences if one.aspect == "length"] == sorted(
        rows[number]["seq"] for number in (wrote[-1], read[-1], wrote[0])
    )


def test_a_fact_of_one_side_stands_where_its_event_would(trace, rows):
    """A row only the second trace has is placed among the events of the first."""
    at = next(n for n, row in enumerate(rows) if row["stage"] == "balance" and row["entity"] == "trajectory")
    late = next(n for n, row in enumerate(rows) if row["stage"] == "clear" and row["n"])
    changed = copy.deepcopy(rows)
    changed[late]["status"] = ["odd"] * changed[late]["n"]
    changed.insert(
        at, {**rows[at], "field": "extra", "key": [f"{key}x" for key in rows[at]["key"]], "seq": rows[at]["seq"]}
    )
    found = diff(trace(), trace("b", changed))
    assert (found.first.aspect, found.first.field) == ("missing", "extra")
    assert found.first.a is None
    assert (found.first.expected, found.first.actual) == ("none", "a fact")
    assert found.first.alike == rows[at]["n"]
    (count,) = (one for one in found.counts if one.aspect == "missing")
    assert (count.only_a, count.only_b) == (0, rows[at]["n"])


def test_a_stage_that_one_side_lacks_is_named(trace, rows):
    """Its facts are missing, and the stage is listed with its steps."""
    found = diff(
        trace(), trace("b", [row for row in rows if row["stage"] != "ref_log_prob" or row["global_steps"] == 1])
    )
    assert [(one.stage, one.only, one.steps) for one in found.stages] == [("ref_log_prob", "a", (2,))]
    assert aspects_of(found, counted=True) == {"missing"}


def test_the_same_said_again_is_a_copy(trace, rows):
    """Two ranks that say what one said are not two contents."""
    number = next(n for n, row in enumerate(rows) if row["op"] == "optim_step")
    again = [*rows, {**rows[number], "process": "actor:1", "seq": 0}]
    found = diff(trace(), trace("b", again))
    assert aspects_of(found) == {"copies"}
    assert not found.equal
    assert diff(trace(), trace("b", again), ignore=["copies"]).equal


def test_what_is_said_once_a_micro_batch_is_not_paired_over_other_cuts(trace, rows):
    """Loss rows of another number of micro-batches differ by their cut alone; the same number is compared."""
    numbers = [n for n, row in enumerate(rows) if row["loss"] is not None and row["global_steps"] == 1]
    changed = copy.deepcopy(rows)
    changed[numbers[0]]["loss"]["numerator"] += 1
    assert aspects_of(diff(trace(), trace("b", changed)), counted=True) == {"context"}
    finer = [*changed, {**copy.deepcopy(changed[numbers[0]]), "micro_batch": 9}]
    assert aspects_of(diff(trace(), trace("b", finer)), counted=True) == {"micro_batch"}


def test_padding_rows_of_one_side_are_padding(trace, rows):
    """Keys that say they are padding are not missing where the other side needed none."""
    padded = {
        key for row in rows for key, pad in zip(row["key"] or (), row["is_padding"] or (), strict=False) if pad
    }  # fmt: skip
    assert padded
    made = []
    for row in rows:
        kept = [i for i, key in enumerate(row["key"] or ()) if key not in padded]
        whole = row["key"] is None or len(kept) == row["n"]
        made.append(row if whole else {**shuffled(row, kept), "n": len(kept)})
    made = [row for row, before in zip(made, rows, strict=True) if row["n"] or not before["n"]]
    found = diff(trace(), trace("b", made))
    assert aspects_of(found, counted=True) == {"padding"}


def test_a_key_asked_for_in_vain_is_a_fact(trace, rows):
    """The name of a key that was not returned is compared, not how many calls asked."""
    number = next(n for n, row in enumerate(rows) if row["op"] == "consume" and row["asked_n"])
    changed = copy.deepcopy(rows)
    changed[number]["missing"] = ["gone"]
    found = diff(trace(), trace("b", changed))
    assert (found.first.aspect, found.first.key, found.first.actual) == (
        "missing",
        "gone",
        "asked for and not returned",
    )
    changed[number] |= {"missing": rows[number]["missing"], "asked_n": 99}
    assert aspects_of(diff(trace(), trace("b", changed))) == {"rows"}


def test_floats_within_rtol_are_rounding(trace, rows):
    """Another fingerprint with nearly the same statistics is rounding; beyond rtol, or of token ids, it is not."""
    number = next(n for n, row in enumerate(rows) if row["field"] == "advantages" and row["op"] == "forward")
    ids = next(n for n, row in enumerate(rows) if row["field"] == "responses" and row["op"] == "produce")
    base = copy.deepcopy(rows)
    for at in (number, ids):
        count = base[at]["n"]
        said = {"sum_in": 6.0, "min_in": 1.0, "max_in": 2.0, "sum_sq_in": 10.0}
        base[at] |= {name: [value] * count for name, value in said.items()}

    def found(at, by, **options):
        changed = copy.deepcopy(base)
        changed[at]["fingerprint"][0] ^= 1
        changed[at]["sum_in"][0] += by
        return diff(trace("a", base), trace("b", changed), **options)

    assert aspects_of(found(number, 1e-6)) == {"rounding"}
    assert not found(number, 1e-6).equal
    assert found(number, 1e-6, ignore=["rounding"]).equal
    assert aspects_of(found(number, 1e-6, rtol=1e-9)) == {"fingerprint"}
    assert aspects_of(found(number, 1.0)) == {"fingerprint"}
    assert aspects_of(found(ids, 0.0)) == {"fingerprint"}


def test_weights_and_metrics_of_differences_cannot_be_called_rounding(trace, rows):
    """A tensor has no statistics; how far two fields are apart is of rounding itself, and listed as a comparison."""
    tensor = next(n for n, row in enumerate(rows) if row["entity"] == "param" and row["fingerprint"])
    changed = copy.deepcopy(rows)
    changed[tensor]["fingerprint"][0] ^= 1
    found = diff(trace(), trace("b", changed))
    assert aspects_of(found) == {"weights"}
    assert not found.equal
    assert found.first.expected.startswith("fingerprint ")
    metrics = next(n for n, row in enumerate(rows) if row["field"] == "metrics" and row["op"] == "produce")
    base = copy.deepcopy(rows)
    base[metrics]["key"][:2] = ["rollout_corr/kl", "actor/lr"]
    base[metrics]["fingerprint"] = list(range(base[metrics]["n"]))
    for at, aspect in ((0, "comparison"), (1, "fingerprint")):
        changed = copy.deepcopy(base)
        changed[metrics]["fingerprint"][at] ^= 1
        assert aspects_of(diff(trace("c", base), trace(f"d{at}", changed))) == {aspect}


def test_further_ranks_of_a_replica_are_of_place(trace, rows):
    """What they say as well and the slices they are given differ by layout, where the other side shares nothing out."""
    at = next(n for n, row in enumerate(rows) if row["op"] == "consume" and row["entity"] == "trajectory" and row["n"])
    first, second = ({"coord": {"dp": 0, "sp": sp}, "process": f"actor:{sp}"} for sp in range(2))
    again = {**rows[at], **second, "seq": 0}
    slices = [
        {**rows[at], **where, "op": "pad", "field": "input_ids_slice", "seq": 1 + number}
        for number, where in enumerate((first, second))
    ]
    found = diff(trace(), trace("b", [*rows, again, *slices]))
    assert found.equal
    assert aspects_of(found) == {"replica"}
    assert not diff(trace(), trace("b", [*rows, again, *slices]), strict=True).equal
    # a fact that none but a further rank says is missing elsewhere, as is one that a run of the same layout lacks
    alone = {**again, "field": "extra"}
    assert aspects_of(diff(trace(), trace("c", [*rows, alone]))) == {"missing"}
    assert "replica" not in aspects_of(diff(trace("d", [*rows, again, *slices]), trace("e", [*rows, again])))


def test_the_wall_clock_does_not_count(trace, rows):
    """Metrics of time differ from run to run; other metrics count."""
    number = next(n for n, row in enumerate(rows) if row["field"] == "metrics" and row["op"] == "produce")
    base = copy.deepcopy(rows)
    base[number]["key"][:2] = ["timing_s/gen", "perf/total_num_tokens"]
    changed = copy.deepcopy(base)
    changed[number]["sum"][0] += 1
    found = diff(trace("a", base), trace("b", changed), strict=True)
    assert found.equal
    assert aspects_of(found) == {"timing"}
    changed[number]["sum"][1] += 1
    assert not diff(trace("a", base), trace("b", changed)).equal


def test_a_tag_counts_where_it_is_put(trace, rows):
    """A row that carries a version its process was not told of is of place; the row that tags it is content."""
    put = next(n for n, row in enumerate(rows) if row["op"] == "tag" and row["global_steps_tag"])
    carrying = next(n for n, row in enumerate(rows) if row["op"] == "produce" and row["entity"] == "trajectory")
    for number, aspect, equal in ((carrying, "counters", True), (put, "tags", False)):
        changed = copy.deepcopy(rows)
        changed[number]["global_steps_tag"] = [7] * changed[number]["n"]
        found = diff(trace(f"a{number}"), trace(f"b{number}", changed))
        assert (found.equal, aspects_of(found)) == (equal, {aspect})


def test_place_counts_when_it_is_asked_to(trace, rows):
    """Another process, rank or slot is listed; strict, it makes the traces differ."""
    changed = copy.deepcopy(rows)
    number = next(n for n, row in enumerate(rows) if row["slot"] and None not in row["slot"])
    changed[number] |= {"process": "worker:3", "rank": 3, "slot": [slot + 100 for slot in rows[number]["slot"]]}
    found = diff(trace(), trace("b", changed))
    assert found.equal
    assert aspects_of(found) == {"process", "rank", "counters"}
    strict = diff(trace(), trace("b", changed), strict=True)
    assert not strict.equal
    assert strict.first.aspect == "process"
    assert not diff(trace(), trace("b", changed), strict=True, ignore=["process,rank"]).equal
    assert diff(trace(), trace("b", changed), strict=True, ignore=["process,rank", "counters"]).equal
    assert diff(trace(), trace("b", changed), strict=True, ignore=["place"]).equal


def test_other_types_and_absent_columns_say_the_same(trace, rows, tmp_path):
    """Another writer's strings and numbers are no difference, nor is a column that says nothing."""
    table = pq.read_table(trace())
    wide = table.drop_columns(["topology", "truncated_from"])
    for name, type_ in (("process", pa.large_string()), ("n", pa.int64()), ("mask_sum", pa.large_list(pa.int32()))):
        wide = wide.set_column(wide.schema.get_field_index(name), name, wide[name].cast(type_))
    pq.write_table(wide, tmp_path / "wide.parquet")
    found = diff(trace(), tmp_path / "wide.parquet", strict=True)
    assert aspects_of(found) <= {"topology"}
