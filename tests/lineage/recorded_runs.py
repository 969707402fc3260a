"""Small runs for the tests of long ones, in this process and in children that are killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import synthetic

from lineage.buffers import part_schema
from lineage.parts import PARTS
from lineage.run import RunInfo
from lineage.state import StateFile
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


CHILD = """
import os, sys
sys.path[:0] = {paths!r}
from pathlib import Path
from lineage import compact as compaction
from lineage.recorder import Recorder
from lineage.run import RunInfo
from recorded_runs import step_of, synthetic_run
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


def child_command(program: str) -> list[str]:
    """The command that runs a program in a process of its own."""
    paths = [str(Path(synthetic.__file__).parent), str(Path(__file__).parent)]
    return [sys.executable, "-c", CHILD.format(paths=paths, program=program)]


def in_child(program: str, code: int = 0) -> None:
    """Run a program in a process of its own, which must end with this code."""
    done = subprocess.run(child_command(program), check=False, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
