"""Finding a trace: every way it can be unusable is one line that says what, where and how to mend it."""

from __future__ import annotations

import os
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lineage.buffers import part_schema
from lineage.parts import PARTS
from lineage.schema import META_STATE, META_VERSION, schema
from lineage.state import StateFile
from lineage.traces import TraceError, open_trace
from lineage.traces.source import locate
from lineage.traces.state import merge, read_state
from lineage.writer import PartWriter


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "no such file or folder"),
        (lambda path: path.write_bytes(b""), "the file is empty"),
        (lambda path: path.write_text("not parquet at all"), "not a Parquet file"),
        (lambda path: path.mkdir(), "no trace in this folder"),
        (lambda path: pq.write_table(pa.table({"a": [1]}), path), "not a lineage trace"),
        (lambda path: pq.write_table(schema().empty_table(), path), "the trace is empty"),
        (
            lambda path: pq.write_table(schema().empty_table().replace_schema_metadata({META_VERSION: b"9"}), path),
            "schema version 9 is newer than 1",
        ),
        (
            lambda path: pq.write_table(schema().empty_table().replace_schema_metadata({META_VERSION: b"x"}), path),
            "is not a number",
        ),
    ],
)
def test_an_unusable_path_is_one_clear_line(make, says, tmp_path):
    """Missing, empty, foreign or too new: named, in one line, with the path."""
    path = tmp_path / "trace.parquet"
    make(path)
    with pytest.raises(TraceError) as caught:
        open_trace(path)
    message = str(caught.value)
    assert says in message
    assert str(path) in message
    assert "\n" not in message


def test_metadata_that_is_not_json_is_named(trace_file, tmp_path):
    """A damaged state is not taken for a complete trace."""
    table = pq.read_table(trace_file)
    bad = tmp_path / "bad.parquet"
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, META_STATE: b"{"}), bad)
    with pytest.raises(TraceError, match=r"lineage\.state is not JSON"):
        open_trace(bad)


def test_a_run_folder_means_its_trace(trace_file, tmp_path):
    """Inside a run folder the compacted trace is preferred."""
    shutil.copy(trace_file, tmp_path / "trace.parquet")
    assert locate(tmp_path).files == (tmp_path / "trace.parquet",)


def test_a_glob_reads_its_files_as_one_trace(trace_file, tmp_path):
    """Several files are one trace, and rows keep an id of their own."""
    for name in ("a.parquet", "b.parquet"):
        shutil.copy(trace_file, tmp_path / name)
    with open_trace(tmp_path / "*.parquet") as trace, open_trace(trace_file) as one:
        assert trace.rows.count("*").fetchall()[0][0] == 2 * one.rows.count("*").fetchall()[0][0]
        assert trace.sql("select count(*) = count(distinct rid) from stored").fetchall()[0][0]
    with pytest.raises(TraceError, match="no file matches"):
        open_trace(tmp_path / "*.nothing")


def test_metadata_added_after_the_schema_is_read(trace_file, tmp_path):
    """Compaction writes the state when the file ends: a torn step named there is not overlooked."""
    table = pq.read_table(trace_file)
    late = tmp_path / "late.parquet"
    with pq.ParquetWriter(late, table.schema.remove_metadata()) as writer:
        writer.write_table(table.replace_schema_metadata(None))
        writer.add_key_value_metadata({META_STATE: b'{"closed": false, "torn": [3]}'})
    assert locate(late).state.unseen == (3,)


def test_parts_are_read_through_a_temporary_file_that_goes_away(trace_file, tmp_path):
    """What a killed run left is read like a file; closing the trace removes what was made for it, not the parts."""
    parts = tmp_path / PARTS
    writer = PartWriter(parts, "driver")
    table = pq.read_table(trace_file)
    for batch in table.cast(part_schema()).combine_chunks().to_batches():
        writer.write(batch, 1)
    state = StateFile(parts, "driver")
    state.sealed(1)
    state.begin(2, traced=True)
    state.close()
    with open_trace(tmp_path) as trace:
        (made,) = trace.source.files
        assert made.exists()
        assert trace.state.torn == (2,)
        assert trace.sql('select count(*) from "rows"').fetchall() == [(table.num_rows,)]
    assert not made.parent.exists()
    assert any(parts.iterdir())


def test_a_state_says_what_is_missing():
    """Torn steps, dropped rows and an unclosed run each make a trace incomplete, by name."""
    assert read_state({}).complete
    state = read_state({"closed": False, "torn": [4], "dropped": {"rows": 3, "steps": [2], "why": ["disk full"]}})
    assert (state.complete, state.unseen) == (False, (2, 4))
    assert state.sentence() == "step 4 torn, 3 rows dropped in step 2, the run did not close its trace (disk full)"
    both = merge([read_state({}), state])
    assert (both.closed, both.torn, both.dropped_rows) == (False, (4,), 3)


@pytest.mark.parametrize("name", [b"b\xff.parquet", b"a" * 300, b"a/" * 3000], ids=["not UTF-8", "long", "deep"])
def test_a_name_the_system_refuses_is_one_line(trace_file, tmp_path, name):
    """A path nobody can open is bad input, not a bug; a file of such a name is there and still cannot be read."""
    if len(name) < 100:
        os.link(trace_file, os.path.join(os.fsencode(tmp_path), name))
    with pytest.raises(TraceError) as raised:
        locate(os.fsdecode(os.path.join(os.fsencode(tmp_path), name)))
    assert "\n" not in str(raised.value)
