"""Laws of a comparison: what must not matter does not, and whatever else is changed is found where it is."""

from __future__ import annotations

import copy
import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from two_steps import PLACE, aspects_of, shuffled, small, write

from lineage.schema import COLUMNS, LISTED, SCALARS
from lineage.traces.diff import ASPECTS, aspects, compare, diff

FEW = settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


def cut(row, at, process):
    """A row as two: the elements up to a place, and those behind it, of another process."""
    first, second = dict(row), dict(row)
    for column in LISTED:
        if row[column.name] is not None:
            first[column.name], second[column.name] = row[column.name][:at], row[column.name][at:]
    first["n"], second["n"] = at, row["n"] - at
    return first, {**second, "process": process, "rank": 7, "missing": None}


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


def test_the_scalars_of_the_schema_are_read():
    """What is read covers every column that is compared, and no more than the schema has."""
    from lineage.traces.diff.facts import READ

    assert set(READ) == {column.name for column in (*SCALARS, *LISTED)} - {"run_id", "parent"}


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
