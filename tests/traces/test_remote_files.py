"""A trace that lies elsewhere is copied, read and forgotten; what goes wrong on the way is one line."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path

import pytest
import synthetic

from lineage.buffers import part_schema
from lineage.checks import check
from lineage.compact import compact
from lineage.parts import PARTS
from lineage.run import RunInfo
from lineage.state import StateFile
from lineage.traces import TraceError, open_trace
from lineage.writer import PartWriter

fsspec = pytest.importorskip("fsspec")


def run_in_parts(folder: Path) -> Path:
    """A closed run of three small steps, in parts of one step."""
    parts = folder / PARTS
    parts.mkdir(parents=True)
    state, writer = StateFile(parts, "driver", "synthetic"), PartWriter(parts, "driver")
    RunInfo("synthetic").write(parts)
    for step, rows in enumerate(synthetic.steps(3, synthetic.small()), start=1):
        for batch in synthetic.to_table(rows, step * 10_000).cast(part_schema()).combine_chunks().to_batches():
            writer.write(batch, step)
        writer.seal()
        state.sealed(step)
    state.state["closed"] = True
    state.close()
    return folder


@pytest.fixture
def uploaded(tmp_path):
    """Puts a local file or folder into a memory file system of its own; returns the URL."""
    files = fsspec.filesystem("memory")
    root = f"/{uuid.uuid4().hex}"

    def put(local: Path, name: str) -> str:
        files.put(str(local), f"{root}/{name}", recursive=True)
        return f"memory:/{root}/{name}"

    yield put
    files.rm(root, recursive=True)


@pytest.mark.parametrize(
    "how",
    [
        "file",
        "parts",
        *(
            pytest.param(how, marks=pytest.mark.slow)
            for how in ("folder", "parts folder", "a part", "segments", "glob", "files")
        ),
    ],
)
@pytest.mark.slow
def test_a_url_is_read_like_a_path(tmp_path, uploaded, how, monkeypatch):
    """A file, a run folder in any state, a glob: the same verdicts as on the spot; the copy goes when it is closed."""
    run = run_in_parts(tmp_path / "run")
    here = check(run)
    if how == "segments":
        monkeypatch.setattr("lineage.compact._SEGMENT_FACTS", 10)
    if "part" not in how:
        compact(run)
    if how == "file":
        url = uploaded(run / "trace.parquet", "any name.parquet")
    else:
        url = uploaded(run, "run")
        url += {"parts folder": "/parts", "a part": "/parts/driver-00001.arrow", "glob": "/*.parquet"}.get(how, "")
    with open_trace(url) as trace:
        assert trace.path == url
        assert trace.source.temporary.exists()
        assert len(trace.source.files) == (3 if how == "segments" else 1)
        there = check(trace)
        assert trace.sql('select count(*) from "rows"').fetchall() == [(here.rows,)]
    assert not trace.source.temporary.exists()
    assert (
        (there.exit_code, there.facts, there.state) == (here.exit_code, here.facts, here.state) == (0, here.facts, "")
    )
    assert str(there.path) == url


def test_any_protocol_fsspec_knows_is_read(tmp_path):
    """file:// too, and one that a program registers itself."""
    from fsspec.implementations.local import LocalFileSystem

    class Mine(LocalFileSystem):
        protocol = "mine"

        @classmethod
        def _strip_protocol(cls, path):
            return LocalFileSystem._strip_protocol(path.removeprefix("mine://"))

    fsspec.register_implementation("mine", Mine, clobber=True)
    trace = compact(run_in_parts(tmp_path / "run"))
    for url in (f"file://{trace}", f"mine://{trace}", f"mine://{trace.parent}"):
        assert check(url, select="KEY001").exit_code == 0


def test_a_glob_of_several_files_is_read(tmp_path):
    """Files of one name in two folders too: each is copied to a place of its own."""
    for name in ("a", "b"):
        compact(run_in_parts(tmp_path / name))
    with open_trace(f"file://{tmp_path}/*/trace.parquet") as trace:
        assert [file.name for file in trace.source.files] == ["trace.parquet"] * 2
        rows = check(tmp_path / "a", select="KEY001").rows
        assert trace.sql('select count(*) from "rows"').fetchall() == [(2 * rows,)]


def test_nothing_there_is_one_line(uploaded, tmp_path):
    """As for a path; and a folder without a trace says what was looked for."""
    with pytest.raises(TraceError, match=r"^memory://nowhere/at/all: no such file or folder$"):
        open_trace("memory://nowhere/at/all")
    with pytest.raises(TraceError, match=r"^memory://nowhere/\*\.parquet: no file matches$"):
        open_trace("memory://nowhere/*.parquet")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("x")
    with pytest.raises(TraceError, match="no trace in this folder"):
        open_trace(uploaded(tmp_path / "empty", "empty"))


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (PermissionError("Forbidden\nrequest id 7"), r"cannot be read \(PermissionError: Forbidden\)"),
        (RuntimeError(""), r"cannot be read \(RuntimeError: RuntimeError\)"),
        (FileNotFoundError("gone"), "it changed while it was copied; try again"),
    ],
)
def test_what_the_other_side_refuses_is_one_line(uploaded, tmp_path, monkeypatch, error, says):
    """Whatever kind of error a protocol raises, nothing is left behind."""
    url = uploaded(compact(run_in_parts(tmp_path / "run")), "trace.parquet")

    def refuse(*arguments, **options):
        raise error

    room = tmp_path / "room"
    room.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(room))
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "get_file", refuse)
    with pytest.raises(TraceError, match=says) as caught:
        open_trace(url)
    assert "\n" not in str(caught.value)
    assert not list(room.iterdir())


def test_a_missing_package_is_named_with_its_pip_line(monkeypatch):
    """Without fsspec, or without the package of the protocol."""
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(TraceError, match=r"^s3://bucket/run: .*missing: pip install fsspec s3fs$"):
        open_trace("s3://bucket/run")
    with pytest.raises(TraceError, match=r"missing: pip install fsspec$"):
        open_trace("memory://x")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(TraceError, match=r"missing: pip install fsspec gcsfs$"):
        open_trace("gs://bucket/run")
    with pytest.raises(TraceError, match=r"^nonsense://x: .*nonsense"):
        open_trace("nonsense://x")
