"""Two traces held against each other: what is the same fact, what differs, and where it parts first."""

from __future__ import annotations

import copy
import json
import random
from functools import cache

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import synthetic
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lineage.schema import COLUMNS, LISTED, SCALARS, schema
from lineage.traces import TraceError
from lineage.traces.diff import ASPECTS, UnknownAspect, aspects, compare, diff

FEW = settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
PLACE = {aspect.name for aspect in ASPECTS if aspect.group == aspects.PLACE}
#: listed columns whose change is a change of content or form
CELLS = [
    (name, aspect.name)
    for aspect in ASPECTS
    if aspect.group != aspects.PLACE
    for name in aspect.columns
    if name in {column.name for column in LISTED}
]
#: scalar columns likewise; of a struct, one of its parts
ROW_CELLS = [
    ("dtype", "dtype"), ("device", "device"), ("container", "container"), ("producer", "producer"),
    ("consumer", "consumer"), ("layout", "layout"), ("requires_grad", "requires_grad"), ("weights.version", "context"),
    ("loss.numerator", "context"), ("optim.lr", "context"), ("attrs", "context"),
]  # fmt: skip


@cache
def small():
    """The rows of two small steps, as dictionaries."""
    made = [row for step in synthetic.steps(2, synthetic.small(padding=4)) for row in step]
    return synthetic.to_table(made).to_pylist()


@pytest.fixture
def rows():
    """The rows of two small steps."""
    return small()


@pytest.fixture
def trace(rows, tmp_path):
    """Writes rows as a trace; without any, those of the small steps."""
    return lambda name="a", changed=None, **meta: write(tmp_path / f"{name}.parquet", changed or rows, **meta)


def write(path, rows, **meta):
    said = schema().metadata | {f"lineage.{name}".encode(): json.dumps(value).encode() for name, value in meta.items()}
    pq.write_table(pa.Table.from_pylist(rows, schema().with_metadata(said)), path)
    return path


def aspects_of(found, counted=None):
    return {one.aspect for one in found.counts if counted is None or one.counts is counted}


def cut(row, at, process):
    """A row as two: the elements up to a place, and those behind it, of another process."""
    first, second = dict(row), dict(row)
    for column in LISTED:
        if row[column.name] is not None:
            first[column.name], second[column.name] = row[column.name][:at], row[column.name][at:]
    first["n"], second["n"] = at, row["n"] - at
    return first, {**second, "process": process, "rank": 7, "missing": None}


def shuffled(row, order):
    """A row with its elements in another order."""
    return {
        **row,
        **{column.name: [row[column.name][i] for i in order] for column in LISTED if row[column.name] is not None},
    }


def other(value):
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list):  # marks
        return [{**value[0], "fp": value[0]["fp"] ^ 1}, *value[1:]]
    return value + 1


def test_every_column_is_someones_business():
    """No column of the schema is left out: it says who a fact is, it is of an aspect, or of one run only."""
    said = {name for aspect in ASPECTS for name in aspect.columns}
    assert said | set(aspects.IDENTITY) | set(aspects.OF_THE_RUN) == {column.name for column in COLUMNS}
    assert not said & {*aspects.IDENTITY, *aspects.OF_THE_RUN}


def test_a_trace_is_equal_to_itself(trace):
    """Nothing differs, in no way, however strictly."""
    found = diff(trace(), trace("b"), strict=True)
    assert found.equal
    assert found.complete
    assert (found.first, found.counts, found.differences, found.stages, found.settings) == (None, (), (), (), ())
    assert found.steps == (0, 1, 2)
    assert found.a.facts == found.b.facts > 2000


@FEW
@given(seed=st.integers(0, 1 << 32))
def test_cutting_and_shuffling_rows_changes_nothing_but_place(tmp_path, seed):
    """Facts over more rows, of other processes, in other order: equal, and the place is said to differ."""
    rows, made, draw = small(), [], random.Random(seed)
    for row in rows:
        row = shuffled(row, draw.sample(range(row["n"]), row["n"]))
        at = draw.randint(0, row["n"])
        made += cut(row, at, "worker:1") if 0 < at < row["n"] else [row]
    seqs = {}
    for row in made:
        row["seq"] = seqs[row["process"]] = seqs.get(row["process"], -1) + 1
    found = diff(write(tmp_path / "a.parquet", rows), write(tmp_path / "b.parquet", made))
    assert found.equal, found.first
    assert aspects_of(found) <= PLACE
    again = diff(tmp_path / "b.parquet", tmp_path / "a.parquet")
    assert again.equal
    assert aspects_of(again) == aspects_of(found)


@settings(FEW, max_examples=40)
@given(data=st.data())
def test_any_changed_element_is_found_and_is_the_first_parting(tmp_path, data):
    """One element of one list is changed: it alone differs, by its aspect, at its event and key, from either side."""
    rows = small()
    name, aspect = data.draw(st.sampled_from(CELLS))
    there = [
        number for number, row in enumerate(rows)
        if (name, row["op"]) != ("source_index", "reorder")
        and (name not in aspects.CARRIED or row["op"] == "tag")
        and any(value not in (None, []) for value in row[name] or ())
    ]  # fmt: skip
    if not there:
        return
    changed = copy.copy(rows)
    number = data.draw(st.sampled_from(there))
    row = changed[number] = copy.deepcopy(rows[number])
    at = data.draw(st.sampled_from([i for i, value in enumerate(row[name]) if value not in (None, [])]))
    row[name][at] = other(row[name][at])
    a, b = write(tmp_path / "a.parquet", rows), write(tmp_path / "b.parquet", changed)
    for found in (diff(a, b, rtol=0), diff(b, a, rtol=0)):
        assert not found.equal
        assert [(one.aspect, one.facts) for one in found.counts if one.aspect != "timing"] == [(aspect, 1)]
        first = found.first
        assert (first.aspect, first.global_steps, first.stage, first.op, first.field, first.key) == (
            aspect, row["global_steps"], row["stage"], row["op"], row["field"], row["key"] and row["key"][at],
        )  # fmt: skip
        assert first.expected != first.actual
        assert first.a.seq == first.b.seq == row["seq"]


@settings(FEW, max_examples=25)
@given(data=st.data())
def test_any_changed_scalar_is_found_for_all_facts_of_its_row(tmp_path, data):
    """What a row says of all its elements, changed: every fact of the row differs, and the two sides swap."""
    rows = small()
    name, aspect = data.draw(st.sampled_from(ROW_CELLS))
    column, _, part = name.partition(".")
    there = [number for number, row in enumerate(rows) if row[column] and (not part or row[column][part] is not None)]
    if not there:
        return
    number = data.draw(st.sampled_from(there))
    changed = copy.copy(rows)
    row = changed[number] = copy.deepcopy(rows[number])
    if column == "attrs":
        row["attrs"] = [*dict(row["attrs"]).items(), ("more", "x")]
    elif part:
        row[column][part] = other(row[column][part])
    else:
        row[column] = other(row[column])
    a, b = write(tmp_path / "a.parquet", rows), write(tmp_path / "b.parquet", changed)
    found, swapped = diff(a, b), diff(b, a)
    assert not found.equal
    assert aspects_of(found, counted=True) == {aspect}
    assert sum(one.facts for one in found.counts if one.counts) == max(1, row["n"])
    assert (found.first.expected, found.first.actual) == (swapped.first.actual, swapped.first.expected)
    assert found.first.alike == max(1, row["n"])


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


def test_steps_of_one_side_are_counted_as_steps(trace, rows):
    """A shorter run differs by its steps alone, which can be allowed; a range of steps leaves them out."""
    short = trace("b", [row for row in rows if row["global_steps"] != 2])
    found = diff(trace(), short)
    assert (found.only_a, found.only_b, found.counts, found.equal) == ((2,), (), (), False)
    assert diff(trace(), short, ignore=["steps"]).equal
    assert diff(trace(), short, steps=(0, 1)).equal
    with pytest.raises(TraceError, match="no step from 8 to 9"):
        diff(trace(), short, steps=(8, 9))


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


def test_runs_without_a_key_in_common_are_said_to_be_so(trace, rows):
    """Other seeds give other uids: one line, not a million facts that are missing."""
    changed = copy.deepcopy(rows)
    for row in changed:
        if row["entity"] in ("trajectory", "prompt", "turn", "request") and row["key"]:
            row["key"] = [f"other{key}" for key in row["key"]]
    found = diff(trace(), trace("b", changed))
    assert found.disjoint
    assert not found.equal
    assert (found.counts, found.differences, found.first) == ((), (), None)


def test_keys_in_common_later_are_compared(trace, rows):
    """Two runs whose first steps share no key, and whose second do, are compared."""
    changed = copy.deepcopy(rows)
    for row in changed:
        if row["global_steps"] == 1 and row["entity"] in ("trajectory", "prompt") and row["key"]:
            row["key"] = [f"other{key}" for key in row["key"]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "SLICE_FACTS", 1)
        found = diff(trace(), trace("b", changed))
    assert not found.disjoint
    assert {one.first_step for one in found.counts} == {1}


def test_slices_give_the_same(trace, rows, monkeypatch):
    """A step at a time or all together: the same counts, the same headline, the same examples."""
    changed = copy.deepcopy(rows)
    for number in range(0, len(rows), 7):
        if changed[number]["fingerprint"]:
            changed[number]["fingerprint"][0] = 5
    a, b = trace(), trace("b", changed)
    whole = diff(a, b)
    monkeypatch.setattr(compare, "SLICE_FACTS", 1)
    assert diff(a, b) == whole
    assert {one.first_step for one in whole.counts} == {1, 2}


def test_what_is_not_whole_is_not_compared(trace, rows):
    """A torn step is left out on both sides: no difference is then no proof, a difference is one."""
    torn = trace("b", [row for row in rows if row["global_steps"] < 2 or row["seq"] % 2], state={"torn": [2]})
    found = diff(trace(), torn)
    assert (found.equal, found.complete, found.unseen, found.steps) == (True, False, (2,), (0, 1))
    assert "torn" in found.b.incomplete
    changed = copy.deepcopy(rows)
    changed[0]["producer"] = "another"
    assert not diff(trace("c", changed), torn).equal


def test_settings_that_differ_are_listed(trace):
    """Configurations are not facts: they are named, and do not count."""
    a = trace("a", config={"trainer": {"seed": 1, "x": [1]}}, run={"versions": {"torch": "2.11"}})
    b = trace("b", config={"trainer": {"seed": 1, "x": [2]}}, run={"versions": {"torch": "2.12"}})
    found = diff(a, b)
    assert found.equal
    assert [(one.name, one.a, one.b) for one in found.settings] == [
        ("trainer.x", [1], [2]),
        ("versions.torch", "2.11", "2.12"),
    ]


def test_other_types_and_absent_columns_say_the_same(trace, rows, tmp_path):
    """Another writer's strings and numbers are no difference, nor is a column that says nothing."""
    table = pq.read_table(trace())
    wide = table.drop_columns(["topology", "truncated_from"])
    for name, type_ in (("process", pa.large_string()), ("n", pa.int64()), ("mask_sum", pa.large_list(pa.int32()))):
        wide = wide.set_column(wide.schema.get_field_index(name), name, wide[name].cast(type_))
    pq.write_table(wide, tmp_path / "wide.parquet")
    found = diff(trace(), tmp_path / "wide.parquet", strict=True)
    assert aspects_of(found) <= {"topology"}


def test_several_runs_are_refused(trace, rows):
    """Rows of two runs cannot be told apart by key: the line names them."""
    both = trace("b", [*rows, *({**row, "run_id": "second"} for row in rows)])
    with pytest.raises(TraceError, match="rows of 2 runs \\(second, synthetic\\)"):
        diff(trace(), both)


def test_names_of_aspects():
    """Names and groups, repeated or with commas; another name is one line with a suggestion."""
    assert aspects.allowed() == PLACE
    assert aspects.allowed(["layout, dtype", "copies"]) == PLACE | {"layout", "dtype", "copies"}
    assert aspects.allowed(["form"]) >= {aspect.name for aspect in ASPECTS if aspect.group == aspects.FORM}
    assert aspects.allowed(strict=True) == {"timing"}
    with pytest.raises(UnknownAspect, match="no aspect 'layuot', did you mean 'layout'; known: steps, missing, length"):
        aspects.allowed(["layuot"])


def test_the_scalars_of_the_schema_are_read():
    """What is read covers every column that is compared, and no more than the schema has."""
    from lineage.traces.diff.facts import READ

    assert set(READ) == {column.name for column in (*SCALARS, *LISTED)} - {"run_id", "parent"}
