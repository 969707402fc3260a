"""Each folder has one run at a time, and the link to the latest is always valid."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from recorded_runs import child_command, in_child, step_of, steps_in, synthetic_run

from lineage.compact import compact
from lineage.errors import RecorderError, UserError
from lineage.parts import PARTS
from lineage.recorder import Recorder
from lineage.run import RunInfo, point_latest


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


@pytest.mark.parametrize(("name", "absent"), [("lock", lambda descriptor, wait: None), ("fcntl", None)])
def test_without_locks_the_process_number_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, absent: object
) -> None:
    """Where file system or Python has no locks a live process is still refused, and a dead one can be started again."""
    monkeypatch.setattr(f"lineage.locks.{name}", absent)
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
    running = [
        subprocess.Popen(child_command(program), stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(3)
    ]
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
    running = [subprocess.Popen(child_command(program)) for _ in range(2)]
    while any(process.poll() is None for process in running):
        assert (tmp_path / "latest").is_dir()
    assert [process.returncode for process in running] == [0, 0]
    assert len([path for path in tmp_path.iterdir() if re.fullmatch(r"\d{8}-\d{6}-\w{4}", path.name)]) == 120
    assert not list(tmp_path.glob(".latest*"))


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
