"""Damaged and odd traces: a report, or one line that names the file; never another error, never a quiet pass."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lineage.checks.gate import Gate
from lineage.checks.report import Refused, Report
from lineage.checks.settings import Settings
from lineage.compact import compact
from lineage.recorder import Recorder
from lineage.run import RunInfo
from lineage.schema import COLUMNS, META_CONFIG, META_RUN, META_SEGMENT, META_STATE
from lineage.traces import TraceError, open_trace
from lineage.traces.damage import Damaged, Pages, verify
from lineage.traces.life import life

GOOD = Path(__file__).parents[2] / "traces" / "samples" / "good.parquet"
ALL = Gate.of(Settings())
SOME = Gate.of(Settings(select=("KEY001", "MSK002")))


def judged(path: Path, gate: Gate = SOME) -> Report | Refused:
    """What becomes of it; a refusal is one line with the file's name."""
    (outcome,) = gate.judge_all([path])
    if isinstance(outcome, Refused):
        assert str(path) in outcome.message
        assert "\n" not in outcome.message
    return outcome


def with_metadata(target: Path, **changed: object) -> Path:
    """The good sample with other metadata."""
    table = pq.read_table(GOOD)
    meta = {**pq.read_metadata(GOOD).metadata, **{b"lineage." + k.encode(): v for k, v in changed.items()}}
    pq.write_table(table.replace_schema_metadata(meta), target)
    return target


def damaged(data: bytes, seed: int) -> bytes:
    """A bit turned over, a stretch zeroed, or the end cut off."""
    generator = random.Random(seed)
    at, changed = generator.randrange(len(data)), bytearray(data)
    match seed % 4:
        case 0:
            return data[:at]
        case 1:
            stretch = data[at : at + generator.randrange(1, 200)]
            changed[at : at + len(stretch)] = bytes(len(stretch))
        case _:
            changed[at] ^= 1 << generator.randrange(8)
    return bytes(changed)


@pytest.mark.parametrize("seeds", [range(16), pytest.param(range(16, 300), marks=pytest.mark.slow)])
@pytest.mark.slow
def test_damage_anywhere_is_a_report_or_one_line(tmp_path, seeds):
    """Bits and bytes of a file changed, or its end lost: what can be read is judged, the rest is refused."""
    target, data = tmp_path / "trace.parquet", GOOD.read_bytes()
    refused = 0
    for seed in seeds:
        target.write_bytes(damaged(data, seed))
        refused += isinstance(judged(target), Refused)
        with suppress(TraceError), open_trace(target) as trace:
            trace.fetch("select count(key), count(fingerprint) from facts")
            life(trace, "nobody")
    assert 0 < refused < len(seeds)


NAMES = [column.name for column in COLUMNS]
_OFTEN = ("key", "n", "run_id", "fingerprint", "topology")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in _OFTEN else pytest.mark.slow) for name in NAMES]
)
def test_a_column_that_is_missing_or_of_another_type_is_a_report_or_named(tmp_path, name):
    """Text, numbers, lists or nothing where something else belongs."""
    table, target = pq.read_table(GOOD), tmp_path / "trace.parquet"
    place = table.schema.get_field_index(name)
    pq.write_table(table.drop([name]), target)
    judged(target)
    rows = table.num_rows
    for odd in (
        pa.array(["x"] * rows), pa.array([1.5] * rows), pa.array([["x"]] * rows), pa.array([[1]] * rows),
        pa.array([{"dp": "x"}] * rows), pa.nulls(rows),
    ):  # fmt: skip
        pq.write_table(table.set_column(place, name, odd), target)
        outcome = judged(target)
        if isinstance(outcome, Refused):
            assert f"column {name} is " in outcome.message


@pytest.mark.parametrize(
    ("how", "gate"),
    [("DuckDB", SOME), *(pytest.param(how, ALL, marks=pytest.mark.slow) for how in ("DuckDB", "large", "int64"))],
)
def test_the_types_of_other_writers_are_read(tmp_path, how, gate):
    """Larger strings, lists and numbers, and what DuckDB writes, are judged alike."""
    import duckdb

    table, target = pq.read_table(GOOD), tmp_path / "trace.parquet"
    if how == "DuckDB":
        said = {name.decode(): text.decode() for name, text in pq.read_metadata(GOOD).metadata.items()}
        ours = ", ".join(f"'{name}': '{text}'" for name, text in said.items() if name.startswith("lineage."))
        duckdb.execute(f"copy (from '{GOOD}') to '{target}' (format parquet, kv_metadata {{{ours}}})")
    else:
        larger = {pa.int32(): pa.int64()} if how == "int64" else {pa.string(): pa.large_string()}
        for place, field in enumerate(table.schema):
            type_ = larger.get(field.type, field.type)
            if pa.types.is_list(type_) and type_.value_type in (*larger, pa.uint64()):
                element = larger.get(type_.value_type, type_.value_type)
                type_ = pa.list_(element) if how == "int64" else pa.large_list(element)
            table = table.set_column(place, field.with_type(type_), table[place].cast(type_))
        pq.write_table(table, target)
    assert judged_alike(*gate.judge_all([target, GOOD]))


def judged_alike(one: Report | Refused, other: Report | Refused) -> bool:
    """Whether two outcomes are reports that say the same."""
    assert isinstance(one, Report), one
    assert isinstance(other, Report)
    return [(v.code, v.kind, v.examined) for v in one.verdicts] == [
        (v.code, v.kind, v.examined) for v in other.verdicts
    ]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"state": {"torn": "x"}}, "lineage.state is no state"),
        ({"state": {"torn": 3}}, "lineage.state is no state"),
        ({"state": {"dropped": [1]}}, "lineage.state is no state"),
        ({"state": {"removed": [1]}}, "lineage.state is no state"),
        ({"state": {"live": [1]}}, "lineage.state is no state"),
        ({"state": []}, "lineage.state is no JSON object"),
        ({"run": "x"}, "lineage.run is no JSON object"),
        ({"config": 3}, "lineage.config is no JSON object"),
    ],
)
def test_metadata_of_another_shape_is_refused(tmp_path, changed, says):
    """A state that cannot be understood is not taken for that of a complete trace."""
    path = with_metadata(tmp_path / "t.parquet", **{k: json.dumps(v).encode() for k, v in changed.items()})
    outcome = judged(path)
    assert isinstance(outcome, Refused)
    assert says in outcome.message


def test_metadata_that_only_looks_odd_is_read(tmp_path):
    """A plan, profile or setting of another type stops nothing."""
    odd = {"segment": {"plan": [1]}, "run": {"profile": 3}, "config": {"actor_rollout_ref.rollout.n": "x"}}
    path = with_metadata(tmp_path / "t.parquet", **{name: json.dumps(said).encode() for name, said in odd.items()})
    assert {META_SEGMENT, META_RUN, META_CONFIG, META_STATE} <= set(pq.read_metadata(path).metadata)
    assert isinstance(judged(path), Report)


@pytest.fixture(scope="module")
def compacted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace as a recorder leaves it."""
    folder = tmp_path_factory.mktemp("summed") / "run"
    recorder = Recorder(folder, RunInfo("r"))
    recorder.step(1)
    with recorder.stage("rollout", producer="engine") as stage:
        stage.produce({"responses": [[1, 2], [3]], "response_mask": [[1, 1], [1]]}, keys=["u_0_0", "u_1_0"])
    recorder.seal()
    recorder.close()
    assert compact(folder) == folder / "trace.parquet"
    return folder / "trace.parquet"


def chunks(path: Path) -> dict[str, tuple[int, int]]:
    """Where each column of a file lies: its first byte and one past its last."""
    group = pq.read_metadata(path).row_group(0)
    found = {}
    for number in range(group.num_columns):
        one = group.column(number)
        start = one.dictionary_page_offset if one.has_dictionary_page else one.data_page_offset
        found[one.path_in_schema] = (start, start + one.total_compressed_size)
    return found


@pytest.mark.parametrize("at", ["content", "header"])
def test_a_page_that_was_changed_does_not_match_its_sum(tmp_path, compacted, at):
    """Other bytes in a page of any column, read by a code or not, are an error that names it, not other numbers."""
    data, target = compacted.read_bytes(), tmp_path / "trace.parquet"
    for name, (start, end) in list(chunks(compacted).items())[at == "header" :: 3]:
        changed = bytearray(data)
        changed[end - 1 if at == "content" else start] ^= 0xFF
        target.write_bytes(changed)
        said = f"{target}: damaged since it was written: column {name.replace('.list.element', '')}: a page"
        with pytest.raises(TraceError, match=f"^{said}"):
            open_trace(target)
    outcome = judged(target)
    assert isinstance(outcome, Refused)


@pytest.mark.parametrize("junk", [b"\x1c", b"\xff", b"\x08", b"\x15\x80", b"\x18\xff\x7f"])
def test_whatever_stands_in_place_of_a_page_is_damage(tmp_path, compacted, junk):
    """Structs without end, numbers without end, texts longer than the file: none is another error."""
    (target := tmp_path / "trace.parquet").write_bytes(junk * 5000)
    pages = {"has_dictionary_page": False, "data_page_offset": 0, "total_compressed_size": 5000}
    chunk = SimpleNamespace(path_in_schema="key.list.element", **pages)
    group = SimpleNamespace(num_columns=1, column=lambda _: chunk)
    footer = SimpleNamespace(num_row_groups=1, row_group=lambda _: group)
    assert verify(target, footer) == Pages()  # nothing in it has a sum: left to its readers
    data = bytearray(compacted.read_bytes())
    start, end = next(iter(chunks(compacted).values()))
    data[start:end] = (junk * (end - start))[: end - start]
    target.write_bytes(data)
    with pytest.raises(Damaged, match="a page"):
        verify(target, pq.read_metadata(compacted))
    chunk.data_page_offset = -1
    group.num_columns, group.column = 2, [chunk, pq.read_metadata(compacted).row_group(0).column(1)].__getitem__
    with pytest.raises(Damaged, match="column key: it would lie outside the file"):
        verify(target, footer)


def test_every_page_of_ours_has_a_sum_and_other_writers_need_none(tmp_path, compacted):
    """A trace without checksums is read as before, and is known to have none."""
    with open_trace(compacted) as trace:
        assert (trace.source.pages.summed > 100, trace.source.pages.unsummed) == (True, 0)
    pq.write_table(pq.read_table(compacted), tmp_path / "t.parquet")
    with open_trace(tmp_path / "t.parquet") as trace:
        assert (trace.source.pages.summed, trace.source.pages.unsummed > 100) == (0, True)


@pytest.mark.parametrize("name", ["key", "num_turns"])
def test_without_sums_what_cannot_be_decoded_is_named(tmp_path, compacted, name):
    """The column, for a code that reads it and for a question that does."""
    target = tmp_path / "t.parquet"
    pq.write_table(pq.read_table(compacted), target, compression="zstd")
    start, end = next(place for path, place in chunks(target).items() if path.startswith(f"{name}."))
    data = bytearray(target.read_bytes())
    data[start + 30 : end] = b"\7" * (end - start - 30)
    target.write_bytes(data)
    with open_trace(target) as trace, pytest.raises(TraceError, match=rf"cannot be read: column {name}: "):
        trace.fetch(f"select {name} from facts")
    if name == "key":
        outcome = judged(target)
        assert isinstance(outcome, Refused)
        assert f"cannot be read: column {name}: " in outcome.message


@pytest.mark.parametrize("path", ["", "  "])
def test_an_empty_path_is_not_the_current_folder(path, tmp_path, monkeypatch):
    """A variable that is not set does not check whatever lies here."""
    (tmp_path / "trace.parquet").write_bytes(GOOD.read_bytes())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TraceError, match="the path is empty"):
        open_trace(path)
    (outcome,) = SOME.judge_all([path])
    assert isinstance(outcome, Refused)
