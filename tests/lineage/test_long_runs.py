"""Runs that live long: the disk stays bounded, and a killed compaction goes on."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from recorded_runs import in_child, step_of, steps_in, synthetic_run
from typer.testing import CliRunner

import lineage
from lineage import compact as compaction
from lineage.checks import check
from lineage.cli import app
from lineage.compact import compact, materialise
from lineage.errors import RecorderError
from lineage.parts import PARTS, part_files, steps_of
from lineage.recorder import Recorder
from lineage.run import RunInfo
from lineage.segments import trace_files
from lineage.state import read_state


def on_disk(folder: Path) -> set[int]:
    """Steps in the parts of a run."""
    return {step for path in part_files(folder / PARTS) for step in steps_of(path)}


# -- rotation ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "keep", "every"), [(60, 5, 1), (90, 4, 3), pytest.param(2000, 50, 1, marks=pytest.mark.slow)]
)
def test_keep_steps_bounds_disk_and_memory(tmp_path: Path, steps: int, keep: int, every: int) -> None:
    """Never more than twice keep_steps traced steps and one on disk; at the end the last ones, judged clean."""
    folder = tmp_path / "run"
    traced = [step for step in range(1, steps + 1) if (step - 1) % every == 0]
    one_step = 0
    with lineage.record(folder, keep_steps=keep, every=every) as recorder:
        assert isinstance(recorder, Recorder)
        for step in range(1, steps + 1):
            step_of(recorder, step)
            files = list((folder / PARTS).iterdir())
            size = sum(path.stat().st_size for path in files if ".arrow" in path.name)
            one_step = one_step or size
            assert size <= (2 * keep + 1) * one_step
            assert len(files) <= 2 * keep + 4
            if step % keep == 1:
                held = on_disk(folder)
                assert len(held) <= 2 * keep + 1
                assert {past for past in traced if past <= step} - held <= set(traced[:-keep])
            assert read_state(folder / PARTS / "driver.state.json")["torn"] == []
            assert (folder / PARTS / "driver.state.json").stat().st_size == 4096
            assert not recorder.elements._tags
            assert len(recorder._writer._kept) <= keep
            assert len(recorder._state.state["removed"].ranges) <= 1
    (trace,) = trace_files(folder)
    held_at_end = steps_in(trace)
    assert held_at_end[-keep:] == traced[-keep:]
    assert len(held_at_end) <= 2 * keep
    report = check(trace, select=["KEY", "MSK", "QUE"])
    assert (report.exit_code, report.state) == (0, "")
    with lineage.open(trace) as opened:
        assert opened.state.removed == len(traced) - len(held_at_end)


def test_whole_steps_stay_clean_when_older_ones_are_removed(tmp_path: Path) -> None:
    """Every stage of a step is judged as in a whole trace; nothing is torn or missing."""
    synthetic_run(tmp_path / "run", 12, keep_steps=3)
    assert steps_in(compact(tmp_path / "run"))[-3:] == [10, 11, 12]
    report = check(tmp_path / "run", select=["KEY", "MSK", "QUE"])
    assert (report.exit_code, report.state) == (0, "")
    assert report.facts > 1000


def test_what_was_before_the_first_step_stays(tmp_path: Path) -> None:
    """Step 0 says what the run started from: it outlives the steps after it."""
    with lineage.record(tmp_path / "run", keep_steps=2) as recorder:
        for step in range(0, 9):
            step_of(recorder, step)
    steps = steps_in(tmp_path / "run" / "trace.parquet")
    assert steps[0] == 0
    assert steps[1] > 3


def test_processes_are_trimmed_to_the_steps_all_of_them_still_have(tmp_path: Path) -> None:
    """One rank keeps two steps, the other all: only steps that are whole are in the trace."""
    folder = tmp_path / "run"
    ranks = [
        Recorder(folder, RunInfo("r"), process="actor:0", rank=0, keep_steps=2),
        Recorder(folder, RunInfo("r"), process="actor:1", rank=1),
    ]
    for step in range(1, 10):
        for recorder in ranks:
            step_of(recorder, step)
    kept = sorted(on_disk_of(folder, "actor-0"))
    assert steps_in(materialise(folder)) == kept
    for recorder in ranks:
        recorder.close()
    assert steps_in(folder / "trace.parquet") == kept
    assert kept[0] > 1
    processes = pq.read_table(folder / "trace.parquet")["process"].to_pylist()
    assert processes.count("actor:0") == processes.count("actor:1")
    assert check(folder, select="KEY001").state == ""


def on_disk_of(folder: Path, stem: str) -> set[int]:
    """Steps in the parts of one process."""
    return {step for path in part_files(folder / PARTS) if path.name.startswith(stem) for step in steps_of(path)}


@pytest.mark.slow
def test_a_restarted_process_removes_what_the_earlier_one_left(tmp_path: Path) -> None:
    """The bound holds over restarts: parts of the killed process count and go."""
    folder = tmp_path / "run"
    for first in (1, 11, 21):
        in_child(f"run({str(folder)!r}, range({first}, {first} + 10), keep_steps=4); os._exit(9)", 9)
        assert len(on_disk(folder)) <= 9
    recorder = Recorder(folder, RunInfo("r"), keep_steps=4)
    for step in range(31, 41):
        step_of(recorder, step)
    assert min(on_disk(folder)) > 30
    recorder.close()
    assert check(folder, select="KEY001").state == ""


def test_a_step_recorded_again_after_its_removal_is_there(tmp_path: Path) -> None:
    """A run that goes back to an earlier step keeps what it records then."""
    with lineage.record(tmp_path / "run", keep_steps=2) as recorder:
        for step in [*range(1, 8), 2, 3]:
            step_of(recorder, step)
    assert {2, 3} <= set(steps_in(tmp_path / "run" / "trace.parquet"))


# -- segments and compaction that goes on ------------------------------------------------------------------------------


@contextmanager
def segments_of(facts: int) -> Iterator[None]:
    """Files of about so many facts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compaction, "_SEGMENT_FACTS", facts)
        yield


def copied(run: Path, target: Path) -> Path:
    """The same run folder elsewhere."""
    subprocess.run(["cp", "-r", str(run), str(target)], check=True)
    return target


def contents(files: list[Path]) -> dict[str, bytes]:
    """Bytes of files by name."""
    return {path.name: path.read_bytes() for path in files}


@pytest.mark.slow
@pytest.mark.parametrize("closed", [True, False])
def test_a_large_run_becomes_segments_cut_between_steps(tmp_path: Path, closed: bool) -> None:
    """Each file holds whole steps and says what the whole run says; together they are judged like one file."""
    synthetic_run(tmp_path / "run", 5, closed=closed)
    whole = compact(copied(tmp_path / "run", tmp_path / "one"))
    with segments_of(1500):
        assert compact(tmp_path / "run") == tmp_path / "run"
    files = trace_files(tmp_path / "run")
    assert [file.name for file in files] == [f"trace-{number:05d}.parquet" for number in range(1, len(files) + 1)]
    assert len(files) > 2
    held = [steps_in(file) for file in files]
    assert [step for steps in held for step in steps] == steps_in(whole) == [0, 1, 2, 3, 4, 5]
    reports = check(whole), check(tmp_path / "run")
    assert reports[0].state == reports[1].state
    assert [(one.code, one.kind, one.examined) for one in reports[0].verdicts] == [
        (one.code, one.kind, one.examined) for one in reports[1].verdicts
    ]
    assert not (tmp_path / "run" / PARTS).exists()
    with pytest.raises(RecorderError, match="already holds a trace"):
        Recorder(tmp_path / "run", RunInfo("r"))


@pytest.mark.parametrize("at", [2, *(pytest.param(at, marks=pytest.mark.slow) for at in (1, 3))])
def test_a_killed_compaction_goes_on_to_the_same_bytes(tmp_path: Path, at: int) -> None:
    """What was finished is not written again, the parts are there until all is, and nothing is left aside."""
    synthetic_run(tmp_path / "run", 5)
    with segments_of(1500):
        compact(copied(tmp_path / "run", tmp_path / "one"))
        program = f"compaction._SEGMENT_FACTS = 1500\ndie_at({at}, 'fsync')\n"
        in_child(program + f"compaction.compact(Path({str(tmp_path / 'run')!r}))", 9)
        finished = {path.name: path.stat().st_ino for path in (tmp_path / "run").glob("trace-*.parquet")}
        assert len(finished) == at
        assert list((tmp_path / "run").glob(".trace*.tmp"))
        assert on_disk(tmp_path / "run") >= {1, 2, 3, 4, 5}
        with lineage.open(tmp_path / "run") as trace:  # half compacted: the parts are the trace
            assert trace.sql("select count(*) from steps where global_steps > 0").fetchall() == [(5,)]
        compact(tmp_path / "run")
    files = trace_files(tmp_path / "run")
    assert {path.name: path.stat().st_ino for path in files if path.name in finished} == finished
    assert contents(files) == contents(trace_files(tmp_path / "one"))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == sorted(path.name for path in files)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["die_at(0, 'fsync')", "die_at(3, 'write_table', pyarrow.parquet.ParquetWriter)"])
def test_a_killed_compaction_to_one_file_gives_the_same_bytes(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed within or at the end of the one file, and run again: as if it had not been killed."""
    synthetic_run(tmp_path / "run", 5)
    monkeypatch.setattr(compaction, "_GROUP_FACTS", 500)
    one = compact(copied(tmp_path / "run", tmp_path / "one"))
    program = f"import pyarrow.parquet\ncompaction._GROUP_FACTS = 500\n{where}\n"
    in_child(program + f"compaction.compact(Path({str(tmp_path / 'run')!r}))", 9)
    assert not (tmp_path / "run" / "trace.parquet").exists()
    assert compact(tmp_path / "run").read_bytes() == one.read_bytes()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["trace.parquet"]


def test_a_compaction_killed_while_it_removes_the_parts_loses_nothing(tmp_path: Path) -> None:
    """With half of the parts gone the trace is not made again from the other half."""
    synthetic_run(tmp_path / "run", 6)
    one = compact(copied(tmp_path / "run", tmp_path / "one"))
    in_child(f"die_at(2, 'unlink', Path)\ncompaction.compact(Path({str(tmp_path / 'run')!r}))", 9)
    assert len(on_disk(tmp_path / "run")) < 6
    assert steps_in(*trace_files(tmp_path / "run")) == steps_in(one)
    assert compact(tmp_path / "run").read_bytes() == one.read_bytes()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["trace.parquet"]


@pytest.mark.slow
def test_segments_of_fewer_parts_are_written_again(tmp_path: Path) -> None:
    """A run that went on after a killed compaction: its earlier files do not pass for those of the whole run."""
    folder = tmp_path / "run"
    in_child(f"run({str(folder)!r}, range(1, 7)); os._exit(9)", 9)
    program = f"compaction._SEGMENT_FACTS = 10\ndie_at(2, 'fsync')\ncompaction.compact(Path({str(folder)!r}))"
    in_child(program, 9)
    assert len(list(folder.glob("trace-*.parquet"))) == 2
    recorder = Recorder(folder, RunInfo("r"))
    step_of(recorder, 7)
    assert recorder.close() == folder / "trace.parquet"
    assert [path.name for path in folder.iterdir()] == ["trace.parquet"]
    assert steps_in(folder / "trace.parquet") == [1, 2, 3, 4, 5, 6, 7]


def test_a_closing_run_of_several_files_gives_its_folder(tmp_path: Path) -> None:
    """close() returns what lineage.open takes."""
    recorder = Recorder(tmp_path / "run", RunInfo("r"))
    for step in range(1, 5):
        step_of(recorder, step)
    with segments_of(10):
        made = recorder.close()
    assert made == tmp_path / "run"
    with lineage.open(made) as trace:
        assert len(trace.source.files) == 4
        assert trace.state.complete


@pytest.mark.parametrize("named", ["parts", "."])
def test_the_parts_folder_of_a_run_is_compacted_into_the_run(
    tmp_path: Path, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace lies where a check of the run looks for it, and the parts go."""
    synthetic_run(tmp_path / "run", 2)
    monkeypatch.chdir(tmp_path / "run" / ("" if named == "parts" else PARTS))
    assert compact(Path(named)).resolve() == tmp_path / "run" / "trace.parquet"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["trace.parquet"]
    assert check(tmp_path / "run", select=["KEY001", "QUE001"]).exit_code == 0


def test_compact_lists_what_it_wrote(tmp_path: Path) -> None:
    """A line a file, and the same files when there is nothing left to do."""
    synthetic_run(tmp_path / "run", 4, closed=False)
    with segments_of(1500):
        said = CliRunner().invoke(app, ["compact", str(tmp_path / "run")])
    assert said.exit_code == 0
    assert said.output.splitlines() == [str(path) for path in trace_files(tmp_path / "run")]
    assert len(said.output.splitlines()) > 1
    assert CliRunner().invoke(app, ["compact", str(tmp_path / "run")]).output == said.output
