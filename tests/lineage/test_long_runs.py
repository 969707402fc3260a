"""Runs that live long: the disk stays bounded, a killed compaction goes on, and each folder has one run at a time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import synthetic
from typer.testing import CliRunner

import lineage
from lineage import compact as compaction
from lineage.buffers import part_schema
from lineage.checks import check
from lineage.cli import app
from lineage.compact import compact, materialise
from lineage.errors import RecorderError, UserError
from lineage.parts import PARTS, part_files, steps_of
from lineage.recorder import Recorder
from lineage.run import RunInfo, point_latest
from lineage.segments import trace_files
from lineage.state import StateFile, read_state
from lineage.writer import PartWriter

KEYS = [f"u_{session}_0" for session in range(4)]


def step_of(recorder: Any, step: int) -> None:
    """A small whole step: what is put is read and cleared again."""
    keys = [f"s{step}{key}" for key in KEYS]
    recorder.step(step)
    recorder.elements.note(keys, [{"global_steps": step, "is_padding": False}] * len(keys))
    with recorder.stage("rollout", producer="engine") as stage:
        stage.produce({"responses": [[step, 2, 3]] * 4, "response_mask": [[1, 1, 1]] * 4}, keys=keys)
    with recorder.stage("advantage", producer="trainer") as stage:
        stage.produce({"advantages": [[0.5, 0.5, 0.5]] * 4}, keys=keys, mask=[[1, 1, 1]] * 4)
    recorder.forget(keys)
    recorder.seal()


def on_disk(folder: Path) -> set[int]:
    """Steps in the parts of a run."""
    return {step for path in part_files(folder / PARTS) for step in steps_of(path)}


def steps_in(*files: Path) -> list[int]:
    """Steps of trace files."""
    return sorted({step for file in files for step in pq.read_table(file)["global_steps"].to_pylist()})


def synthetic_run(folder: Path, steps: int, keep_steps: int | None = None, closed: bool = True) -> None:
    """A run of whole synthetic steps in parts of at most two steps."""
    parts = folder / PARTS
    parts.mkdir(parents=True)
    state = StateFile(parts, "driver", "synthetic")
    RunInfo("synthetic").write(parts)
    writer = PartWriter(parts, "driver", keep_steps)
    seq = 0
    for step, rows in enumerate(synthetic.steps(steps, synthetic.small(padding=4)), start=1):
        table = synthetic.to_table(rows, seq).cast(part_schema()).combine_chunks()
        seq += len(rows)
        state.begin(step, traced=True)
        for batch in table.to_batches():
            writer.write(batch, step)
        state.sealed(step)
        state.begin(step, traced=False)
        state.removed(writer.expired)
        state.write()
        writer.remove_expired()
        if step % 2 == 0:
            writer.seal()
    writer.seal()
    state.state["closed"] = closed
    state.close()


# -- rotation ---------------------------------------------------------------------------------------------------------


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
    report = check(trace)
    assert (report.exit_code, report.state) == (0, "")
    with lineage.open(trace) as opened:
        assert opened.state.removed == len(traced) - len(held_at_end)


def test_whole_steps_stay_clean_when_older_ones_are_removed(tmp_path: Path) -> None:
    """Every stage of a step is judged as in a whole trace; nothing is torn or missing."""
    synthetic_run(tmp_path / "run", 12, keep_steps=3)
    assert steps_in(compact(tmp_path / "run"))[-3:] == [10, 11, 12]
    report = check(tmp_path / "run")
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
    assert check(folder).state == ""


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
    assert check(folder).state == ""


def test_a_step_recorded_again_after_its_removal_is_there(tmp_path: Path) -> None:
    """A run that goes back to an earlier step keeps what it records then."""
    with lineage.record(tmp_path / "run", keep_steps=2) as recorder:
        for step in [*range(1, 8), 2, 3]:
            step_of(recorder, step)
    assert {2, 3} <= set(steps_in(tmp_path / "run" / "trace.parquet"))


# -- segments and compaction that goes on ------------------------------------------------------------------------------


CHILD = """
import os, sys
sys.path[:0] = {paths!r}
from pathlib import Path
from lineage import compact as compaction
from lineage.recorder import Recorder
from lineage.run import RunInfo
from test_long_runs import step_of, synthetic_run
def run(folder, steps, run_id="r", **options):
    recorder = Recorder(folder, RunInfo(run_id), **options)
    for step in steps:
        step_of(recorder, step)
    return recorder
def die_at(call, name, owner=os):
    left = [call]
    real = getattr(owner, name)
    def counted(*arguments, **options):
        left[0] -= 1
        if left[0] < 0:
            os._exit(9)
        return real(*arguments, **options)
    setattr(owner, name, counted)
{program}
"""


def in_child(program: str, code: int = 0) -> None:
    """Run a program in a process of its own, which must end with this code."""
    paths = [str(Path(synthetic.__file__).parent), str(Path(__file__).parent)]
    text = CHILD.format(paths=paths, program=program)
    done = subprocess.run([sys.executable, "-c", text], check=False, capture_output=True, text=True)
    assert done.returncode == code, done.stderr


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


@pytest.mark.parametrize("at", [1, 2, 3])
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


def test_compact_lists_what_it_wrote(tmp_path: Path) -> None:
    """A line a file, and the same files when there is nothing left to do."""
    synthetic_run(tmp_path / "run", 4, closed=False)
    with segments_of(1500):
        said = CliRunner().invoke(app, ["compact", str(tmp_path / "run")])
    assert said.exit_code == 0
    assert said.output.splitlines() == [str(path) for path in trace_files(tmp_path / "run")]
    assert len(said.output.splitlines()) > 1
    assert CliRunner().invoke(app, ["compact", str(tmp_path / "run")]).output == said.output


# -- one run a folder --------------------------------------------------------------------------------------------------


def test_a_second_recorder_of_the_same_name_is_refused(tmp_path: Path) -> None:
    """One line with the pid and what to do; the first goes on undisturbed, and after it ends the name is free."""
    folder = tmp_path / "run"
    first = Recorder(folder, RunInfo("r"))
    step_of(first, 1)
    with pytest.raises(RecorderError, match=rf"'driver' by this process, pid {os.getpid()}.*another folder") as caught:
        Recorder(folder, RunInfo("r"))
    assert "\n" not in str(caught.value)
    program = f"""
try:
    Recorder({str(folder)!r}, RunInfo("r"))
except Exception as error:
    os._exit(5 if "pid {os.getpid()}: end it" in str(error) else 6)
"""
    in_child(program, 5)
    step_of(first, 2)
    assert first.close() is not None
    assert steps_in(folder / "trace.parquet") == [1, 2]


def test_a_process_that_was_killed_can_be_started_again_even_if_its_number_is_used(tmp_path: Path) -> None:
    """The lock goes with the process: a live process of the same number, this one, does not matter."""
    folder = tmp_path / "run"
    in_child(f"r = run({str(folder)!r}, [1]); r._state.state['pid'] = {os.getpid()}; r._state.write(); os._exit(9)", 9)
    recorder = Recorder(folder, RunInfo("r"))
    step_of(recorder, 2)
    recorder.close()
    assert steps_in(folder / "trace.parquet") == [1, 2]


def test_a_forked_child_does_not_keep_the_lock_of_its_dead_parent(tmp_path: Path) -> None:
    """A data loader's worker that outlives a killed trainer is not taken for it."""
    folder = tmp_path / "run"
    program = f"""
r = run({str(folder)!r}, [1])
child = os.fork()
if child == 0:
    import time
    os.close(1); os.close(2)
    time.sleep(60)
Path({str(tmp_path / "child")!r}).write_text(str(child))
os._exit(9)
"""
    in_child(program, 9)
    try:
        recorder = Recorder(folder, RunInfo("r"))
        step_of(recorder, 2)
        assert recorder.close() is not None
    finally:
        os.kill(int((tmp_path / "child").read_text()), 9)


def test_another_run_is_refused_while_one_is_live(tmp_path: Path) -> None:
    """Ranks of one run share a folder; a run of another id is told whose it is, and may have it afterwards."""
    folder = tmp_path / "run"
    ranks = [Recorder(folder, RunInfo("mine"), process=f"actor:{rank}", rank=rank) for rank in (0, 1)]
    with pytest.raises(RecorderError, match=r"by run mine \(process actor:0, pid \d+\): give run yours a folder"):
        Recorder(folder, RunInfo("yours"))
    assert "yours" not in (folder / PARTS / "run.json").read_text()
    assert not list((folder / PARTS).glob("driver*"))
    for rank, recorder in enumerate(ranks):
        step_of(recorder, 1)
        assert (recorder.close() is None) is (rank == 0)


def test_without_locks_the_process_number_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system that has no locks a live process is still refused, and a dead one can be started again."""
    monkeypatch.setattr("lineage.locks.lock", lambda descriptor, wait: None)
    folder = tmp_path / "run"
    first = Recorder(folder, RunInfo("r"))
    assert first._state.state["locked"] is False
    step_of(first, 1)
    with pytest.raises(RecorderError, match="being recorded as 'driver'"):
        Recorder(folder, RunInfo("r"))
    with pytest.raises(UserError, match="still being written"):
        compact(folder)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    first._state.state["pid"] = gone.pid
    first._state.write()
    second = Recorder(folder, RunInfo("r"))
    step_of(second, 2)
    assert second.close() is not None


@pytest.mark.slow
def test_processes_that_close_together_compact_once(tmp_path: Path) -> None:
    """Both find the other closed: one compacts, the other waits and finds the trace."""
    folder = tmp_path / "run"
    synthetic_run(folder, 6)
    program = f"print(compaction.compact(Path({str(folder)!r})))"
    paths = [str(Path(synthetic.__file__).parent), str(Path(__file__).parent)]
    command = [sys.executable, "-c", CHILD.format(paths=paths, program=program)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(3)]
    said = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], said
    assert steps_in(folder / "trace.parquet")[-1] == 6
    assert [path.name for path in folder.iterdir()] == ["trace.parquet"]


def test_latest_is_valid_at_every_moment(tmp_path: Path) -> None:
    """Two programs start runs in one folder over and over: a reader always finds a run behind the link."""
    program = f"""
from lineage.run import new_run_folder, point_latest
for _ in range(60):
    point_latest(new_run_folder(Path({str(tmp_path)!r})))
"""
    point_latest(_made(tmp_path / "first"))
    paths = [str(Path(synthetic.__file__).parent), str(Path(__file__).parent)]
    command = [sys.executable, "-c", CHILD.format(paths=paths, program=program)]
    running = [subprocess.Popen(command) for _ in range(2)]
    while any(process.poll() is None for process in running):
        assert (tmp_path / "latest").is_dir()
    assert [process.returncode for process in running] == [0, 0]
    assert len([path for path in tmp_path.iterdir() if re.fullmatch(r"\d{8}-\d{6}-\w{4}", path.name)]) == 120
    assert not list(tmp_path.glob(".latest*"))


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
