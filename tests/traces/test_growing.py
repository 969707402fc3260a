"""A trace that is still recorded: whoever opens it finds whole steps, and is told that the run goes on."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

import lineage
from lineage import compact as compaction
from lineage.checks import check
from lineage.checks.verdict import ExitCode
from lineage.parts import PARTS, part_files
from lineage.recorder import Recorder
from lineage.run import RunInfo
from lineage.state import read_state
from lineage.traces import TraceError, open_trace

ROWS = 3  # of a step

WRITER = """
import sys, time
from pathlib import Path
from lineage import writer
from lineage.recorder import Recorder
from lineage.run import RunInfo
folder, process, keep, stop = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
writer._SEAL_SECONDS = 0.01 if keep else 0.3
recorder = Recorder(folder, RunInfo("r"), process=process, rank=0, keep_steps=keep or None)
step = 0
while not stop.exists():
    step += 1
    recorder.step(step)
    with recorder.stage("rollout") as stage:
        keys = [f"{process}{step}_0_0", f"{process}{step}_1_0"]
        stage.produce({"responses": [[1, 2], [3]], "response_mask": [[1, 1], [1]]}, keys=keys)
    with recorder.stage("advantage") as stage:
        stage.produce({"advantages": [[0.5, 0.5], [-0.5]]}, keys=keys, mask=[[1, 1], [1]])
    recorder.seal()
    time.sleep(0 if keep else 0.02)
recorder.close()
"""


def step_of(recorder: Recorder, step: int, seal: bool = True) -> None:
    """One row, in one stage."""
    recorder.step(step)
    with recorder.stage("rollout") as stage:
        stage.produce({"responses": [[step]]}, keys=["u_0_0"])
    if seal:
        recorder.seal()


def test_a_live_run_is_told_from_a_killed_one(tmp_path):
    """While it goes on: who, which step, incomplete. Killed: not closed. Closed: nothing to say."""
    recorder = Recorder(tmp_path / "run", RunInfo("r"))
    step_of(recorder, 1)
    step_of(recorder, 2, seal=False)
    report = check(tmp_path / "run", select="KEY001")
    assert report.exit_code == ExitCode.INCOMPLETE
    pid = recorder._state.state["pid"]
    assert report.state == f"the run goes on (process {pid}, step 2 open)"
    assert report.steps == 1
    with lineage.open(tmp_path / "run") as trace:
        assert trace.state.live == (f"process {pid}, step 2 open",)
        assert (trace.state.torn, trace.state.closed) == ((), False)
    recorder._state._forget()  # as the kernel does at its death
    assert check(tmp_path / "run", select="KEY001").state == "step 2 torn, the run did not close its trace"


def test_a_run_without_a_step_yet_says_so(tmp_path):
    """Nothing to judge is one line that says to come back, not that tracing was off."""
    recorder = Recorder(tmp_path / "run", RunInfo("r"))
    recorder.step(1)
    with pytest.raises(TraceError, match=r"no step is recorded yet \(process \d+, step 1 open\)"):
        open_trace(tmp_path / "run")


def test_a_step_that_another_rank_has_not_sealed_is_not_judged(tmp_path):
    """One rank is ahead: what only it has of a step is kept out of the verdicts, and is not torn."""
    ranks = [Recorder(tmp_path / "run", RunInfo("r"), process=f"actor:{rank}", rank=rank) for rank in (0, 1)]
    for recorder in ranks:
        step_of(recorder, 1)
    step_of(ranks[0], 2)
    step_of(ranks[0], 3, seal=False)
    with open_trace(tmp_path / "run") as trace:
        assert (trace.state.open, trace.state.torn) == ((2,), ())
        assert trace.state.unseen == (2,)
        assert len(trace.state.live) == 2
    assert check(tmp_path / "run", select="KEY001").steps == 1


def test_a_part_sealed_or_removed_while_the_folder_is_read_is_no_loss(tmp_path, monkeypatch):
    """Renamed after it was listed: read under its new name. Removed by keep_steps: not missed."""
    recorder = Recorder(tmp_path / "run", RunInfo("r"), keep_steps=2)
    for step in range(1, 6):
        step_of(recorder, step)
    real = compaction.by_process

    def listed_then_changed(files):
        streams = real(files)
        for step in range(first, first + more):
            step_of(recorder, step)
        monkeypatch.setattr(compaction, "by_process", real)
        return streams

    first = 6
    for more, judged in ((1, {5}), (1, {5, 6}), (9, {15, 16})):
        monkeypatch.setattr(compaction, "by_process", listed_then_changed)
        with open_trace(tmp_path / "run") as trace:
            assert trace.state.torn == ()
            assert trace.state.live
            seen = {row[0] for row in trace.sql('select distinct global_steps from "rows"').fetchall()}
            assert seen - set(trace.state.unseen) == judged
        first += more


def test_a_run_that_closes_while_it_is_read_is_read_from_its_file(tmp_path, monkeypatch):
    """The parts go and trace.parquet comes between listing and reading: the reader starts again, whole."""
    recorder = Recorder(tmp_path / "run", RunInfo("r"))
    for step in range(1, 4):
        step_of(recorder, step)
    real = compaction.by_process

    def listed_then_closed(files):
        streams = real(files)
        monkeypatch.setattr(compaction, "by_process", real)
        recorder.close()
        return streams

    monkeypatch.setattr(compaction, "by_process", listed_then_closed)
    with open_trace(tmp_path / "run") as trace:
        assert trace.source.files == (tmp_path / "run" / "trace.parquet",)
        assert trace.state.complete
    with open_trace(tmp_path / "run" / PARTS) as trace:  # who names the parts finds what became of them
        assert trace.state.complete


def test_a_state_read_in_two_halves_is_read_again(tmp_path, monkeypatch):
    """A state mixed of two writings has the wrong sum and is not believed."""
    recorder = Recorder(tmp_path / "run", RunInfo("r"))
    step_of(recorder, 1)
    path = tmp_path / "run" / PARTS / "driver.state.json"
    good = path.read_text()
    mixed = good.replace('"open_step": null', '"open_step": 7777')
    texts = iter([mixed, good])
    monkeypatch.setattr(Path, "read_text", lambda self, *arguments: next(texts))
    assert read_state(path)["open_step"] is None


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "keep"), [(1, 0), (1, 6), (2, 0), (2, 6)])
def test_a_reader_of_a_busy_run_never_fails(tmp_path, ranks, keep):
    """Parts are sealed and removed as fast as can be: every look finds whole steps, no violation, nothing torn."""
    folder, stop = tmp_path / "run", tmp_path / "stop"
    command = [sys.executable, "-c", WRITER, str(folder)]
    running = [subprocess.Popen([*command, f"actor:{rank}", str(keep), str(stop)]) for rank in range(ranks)]
    looks = 0
    try:
        while looks < 6:
            assert all(process.poll() is None for process in running)
            time.sleep(0.05)
            if not folder.exists() or len(list(folder.glob("parts/*.state.json"))) < ranks:
                continue
            try:
                trace = open_trace(folder, views=False)
            except TraceError as error:
                if "no step is recorded yet" not in str(error):
                    raise
                continue
            with trace:
                state = trace.state
                assert state.live, state
                assert state.torn == (), state
                unseen = ", ".join(map(str, (-1, *state.unseen)))
                counts = trace.sql(
                    f'select global_steps, count(*) from "rows" where global_steps not in ({unseen}) group by all'
                ).fetchall()
                assert {count for _, count in counts} <= {ROWS * ranks}, (state, counts)
                report = check(trace)
                assert report.exit_code == ExitCode.INCOMPLETE, report.headline
                looks += 1
    finally:
        stop.touch()
        codes = [process.wait() for process in running]
    assert codes == [0] * ranks
    assert not part_files(folder / PARTS)
    report = check(folder)
    assert (report.exit_code, report.state) == (ExitCode.PASS, "")
