"""``mode=ray`` end to end: Ray's processes, the real TransferQueue, ranks that share a model by FSDP2."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed.checkpoint as dcp

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

SMALL = (
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
    "data.max_response_length=8",
)


def lineage(folder: Path, *words: str, **options: object) -> subprocess.CompletedProcess[str]:
    """A command, as a user types it."""
    command = [sys.executable, "-m", "lineage.cli", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400, check=False, **options)


def run(folder: Path, *overrides: str, mode: str = "ray") -> dict[str, object]:
    """A run that ends in order and checks clean: its summary."""
    done = lineage(folder, "run", "--json", *SMALL, f"mode={mode}", *overrides)
    assert done.returncode == 0, done.stderr[-2000:]
    summary: dict[str, object] = json.loads(done.stdout)
    return summary


def test_a_run_goes_on_with_other_numbers_of_ranks(tmp_path: Path) -> None:
    """Two ranks save, four go on, then one; each of them checks clean, and every process tells its part."""
    saved = (f"trainer.default_local_dir={tmp_path / 'saved'}", "trainer.save_freq=1", "trainer.resume_mode=auto")
    first = run(tmp_path, *saved, "trainer.n_ranks=2", "trainer.total_training_steps=1")
    rows = pq.read_table(tmp_path / str(first["trace"]))
    processes = set(rows["process"].to_pylist())
    assert processes == {"driver", "actor:0", "actor:1", "rollout:0", "agent_loop:0", "reward:0"}
    for ranks, steps in ((4, 2), (1, 3)):
        later = run(tmp_path, *saved, f"trainer.n_ranks={ranks}", f"trainer.total_training_steps={steps}")
        assert later["steps"] == 1
        assert (tmp_path / "saved" / f"global_step_{steps}").is_dir()


# what a process logs comes to the user's console, and stops nothing
WARNING = """
import logging
def compute_score(solution_str, **_):
    logging.getLogger("mine").warning("a score is given")
    return len(solution_str) % 2
"""


def test_one_rank_holds_what_the_embedded_run_holds(tmp_path: Path) -> None:
    """The same facts, bit for bit, by other processes and in other rows; a scorer's warnings stop neither."""
    (tmp_path / "warning.py").write_text(WARNING)
    scorer = [f"reward.custom_reward_function.{key}" for key in ("path=warning.py", "name=compute_score")]
    same = ("trainer.total_training_steps=2", "rollout.max_num_seqs=1", *scorer)
    embedded, ray = (str(run(tmp_path, *same, mode=mode)["trace"]) for mode in ("embedded", "ray"))
    done = lineage(tmp_path, "diff", embedded, ray, "--ignore", "process,rank,layout")
    assert done.returncode == 0, done.stdout
    assert "process" in done.stdout


def test_ranks_that_share_sequences_hold_what_one_rank_holds(tmp_path: Path) -> None:
    """Two ranks of one replica: a clean trace, of one data-parallel rank, equal to that of one rank up to rounding."""
    same = ("trainer.total_training_steps=2", "rollout.max_num_seqs=1")
    shared = ("trainer.n_ranks=2", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2")
    one, two = (str(run(tmp_path, *same, *more)["trace"]) for more in ((), shared))
    rows = pq.read_table(tmp_path / two, columns=["process", "coord", "field", "topology"]).to_pylist()
    (topology,) = (row["topology"] for row in rows if row["field"] == "topology")
    assert (topology["world_size"], topology["sp"], topology["reported_dp"]) == (2, 2, 1)
    slices = {(row["process"], row["coord"]["sp"]) for row in rows if row["field"] == "input_ids_slice"}
    assert slices == {("actor:0", 0), ("actor:1", 1)}
    done = lineage(tmp_path, "diff", one, two, "--rtol", "1e-3", "--ignore", "rounding,comparison,weights")
    assert done.returncode == 0, done.stdout


def test_a_rank_that_is_killed_is_one_error_and_a_trace_that_names_what_it_lacks(tmp_path: Path) -> None:
    """Exit code 2 and one line that names the process; the whole steps are kept, the torn one says what it lacks."""
    command = [sys.executable, "-m", "lineage.cli", "run", "mode=ray", *SMALL, "trainer.n_ranks=2"]
    command += ["trainer.total_training_steps=200", "trainer.logger=[jsonl]"]
    with started(command, tmp_path) as training:
        _wait_for(lambda: bool(_steps(tmp_path)), training)
        os.kill(_rank(tmp_path, "actor:1"), signal.SIGKILL)
        out, said = training.communicate(timeout=200)
    assert training.returncode == 2
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "process actor:1 died in " in errors[0]
    assert "Traceback" not in said
    assert "raylet" not in out + said
    checked = lineage(tmp_path, "check", "-q", "runs/latest")
    assert checked.returncode == 3
    assert "actor:1 left nothing" in checked.stdout


# two steps of eight trajectories are scored, the next one has no end: the driver has no more to tell
HANGING = """
import asyncio, itertools, pathlib
calls = itertools.count(1)
async def compute_score(**_):
    if next(calls) > 16:
        pathlib.Path("hangs").touch()
        await asyncio.Event().wait()
    return 0.0
"""


def test_ctrl_c_ends_a_step_that_hangs_and_keeps_those_before(tmp_path: Path) -> None:
    """Exit code 130; no process is left, none is waited for in vain, and the trace holds the steps that were whole."""
    (tmp_path / "hanging.py").write_text(HANGING)
    scorer = [f"reward.custom_reward_function.{key}" for key in ("path=hanging.py", "name=compute_score")]
    command = [sys.executable, "-m", "lineage.cli", "run", "mode=ray", *SMALL, "trainer.total_training_steps=200"]
    with started([*command, *scorer, "trainer.logger=[jsonl]"], tmp_path) as training:
        _wait_for(lambda: len(_steps(tmp_path)) >= 2 and (tmp_path / "hangs").exists(), training)
        pid = _rank(tmp_path, "actor:0")
        training.send_signal(signal.SIGINT)
        _, said = training.communicate(timeout=200)
    assert training.returncode == 130
    assert "the step did not end" not in said
    _wait_for(lambda: _gone(pid))
    (trace,) = (tmp_path / "runs").glob("2*/trace.parquet")
    assert {1, 2} <= set(pq.read_table(trace)["global_steps"].to_pylist())


OPTIONS = (
    "+experiment=lora_ref",
    "trainer.n_ranks=2",
    "rollout.agent.num_workers=2",
    "reward.num_workers=2",
    "rollout.max_num_seqs=1",  # requests that are decoded together change each other's last bits
    "actor_rollout_ref.model.enable_gradient_checkpointing=true",
    "data.val_files=builtin:add",
    "data.val_max_samples=4",
    "trainer.test_freq=2",
    "trainer.save_freq=3",
    "trainer.default_local_dir=saved",
)


def test_tracing_changes_no_weight_on_two_ranks(tmp_path: Path) -> None:
    """With several workers of each kind, a validation, an adapter and every other step traced; the trace is clean."""
    (traced := tmp_path / "traced").mkdir()
    (untraced := tmp_path / "untraced").mkdir()
    trace = traced / str(run(traced, *OPTIONS, "trace.every=2")["trace"])
    assert run(untraced, *OPTIONS, "trace.enabled=false")["trace"] is None
    assert not list(untraced.glob("runs/2*/*.parquet")) + list(untraced.glob("runs/2*/parts"))
    weights, others = (saved_tensors(folder / "saved/global_step_3/actor") for folder in (traced, untraced))
    assert weights.keys() == others.keys()
    assert any(name.startswith("optimizer.") for name in weights)
    assert [name for name in weights if not torch.equal(weights[name], others[name])] == []
    rows = pq.read_table(trace).to_pylist()
    assert {row["process"] for row in rows} > {"actor:1", "agent_loop:1", "reward:1"}
    assert {row["global_steps"] for row in rows if row["stage"] == "update_actor"} == {1, 3}
    asked = [row for row in rows if row["partition"] == "val" and row["stage"] == "sample" and row["op"] == "produce"]
    assert asked
    assert all(row["max_global_steps"] == [3] * row["n"] for row in asked)  # the driver knows what others have put


def test_several_updates_a_step_and_rewards_after_the_rollout(tmp_path: Path) -> None:
    """On two ranks; both check clean, and nobody scores in a process of its own."""
    summary = run(
        tmp_path, "+experiment=[merged_steps,reward_colocated]", "data.train_batch_size=8", "trainer.n_ranks=2"
    )
    rows = pq.read_table(tmp_path / str(summary["trace"]), columns=["process", "stage", "global_steps"]).to_pylist()
    assert {row["process"] for row in rows} == {"driver", "actor:0", "actor:1", "rollout:0", "agent_loop:0"}
    assert {row["process"] for row in rows if row["stage"] == "reward"} == {"driver"}


def test_a_mistake_is_one_line(tmp_path: Path) -> None:
    """What a process finds wrong with the configuration is said as in embedded mode, and leaves no run."""
    done = lineage(tmp_path, "run", "mode=ray", *SMALL, "reward.custom_reward_function.path=nowhere.py")
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "nowhere.py" in errors[0]
    assert "Traceback" not in done.stderr


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """What the ranks wrote: parameters, moments, the schedule's counters and their generators, by name."""
    reader = dcp.FileSystemReader(folder)
    kinds = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.empty(kind.size, dtype=kind.properties.dtype) for name, kind in kinds.items()}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


@contextlib.contextmanager
def started(command: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A command that runs, and does not outlive a test that fails."""
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _wait_for(what: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    until = time.monotonic() + 300
    while not what():
        assert time.monotonic() < until, "it has not happened in five minutes"
        assert process is None or process.poll() is None, process.stderr.read()
        time.sleep(0.2)


def _gone(pid: int) -> bool:
    """Whether a process has ended; Ray lets its own end by themselves, and one nobody has waited for has ended too."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def _steps(folder: Path) -> list[str]:
    return [line for file in folder.glob("runs/2*/metrics.jsonl") for line in file.read_text().splitlines()]


def _rank(folder: Path, process: str) -> int:
    (state,) = folder.glob(f"runs/2*/parts/{process.replace(':', '-')}.state.json")
    return int(json.loads(state.read_text().partition("\n")[0])["pid"])
