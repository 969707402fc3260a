"""``mode=ray`` end to end: Ray's processes, the real TransferQueue, ranks that share a model by FSDP2."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

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


def test_one_rank_holds_what_the_embedded_run_holds(tmp_path: Path) -> None:
    """The same facts, bit for bit, by other processes and in other rows."""
    same = ("trainer.total_training_steps=2", "rollout.max_num_seqs=1")
    embedded, ray = (str(run(tmp_path, *same, mode=mode)["trace"]) for mode in ("embedded", "ray"))
    done = lineage(tmp_path, "diff", embedded, ray, "--ignore", "process,rank,layout")
    assert done.returncode == 0, done.stdout
    assert "process" in done.stdout


def test_a_rank_that_is_killed_is_one_error_and_a_trace_that_names_what_it_lacks(tmp_path: Path) -> None:
    """Exit code 2 and one line that names the process; the whole steps are kept, the torn one says what it lacks."""
    command = [sys.executable, "-m", "lineage.cli", "run", "mode=ray", *SMALL, "trainer.n_ranks=2"]
    command += ["trainer.total_training_steps=200", "trainer.logger=[jsonl]"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as training:
        until = time.monotonic() + 300
        while not _steps(tmp_path):
            assert time.monotonic() < until, "no step was trained"
            assert training.poll() is None, training.stderr.read()
            time.sleep(0.2)
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


def test_ctrl_c_ends_every_process_and_keeps_the_steps(tmp_path: Path) -> None:
    """Exit code 130; nothing is left running, and the trace holds the steps that were whole."""
    command = [sys.executable, "-m", "lineage.cli", "run", "mode=ray", *SMALL, "trainer.total_training_steps=200"]
    with subprocess.Popen(
        [*command, "trainer.logger=[jsonl]"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as training:
        until = time.monotonic() + 300
        while len(_steps(tmp_path)) < 2:
            assert time.monotonic() < until, "no step was trained"
            time.sleep(0.2)
        pid = _rank(tmp_path, "actor:0")
        training.send_signal(signal.SIGINT)
        training.communicate(timeout=200)
    assert training.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    (trace,) = (tmp_path / "runs").glob("2*/trace.parquet")
    assert {1, 2} <= set(pq.read_table(trace)["global_steps"].to_pylist())


def test_a_mistake_is_one_line(tmp_path: Path) -> None:
    """What a process finds wrong with the configuration is said as in embedded mode, and leaves no run."""
    done = lineage(tmp_path, "run", "mode=ray", *SMALL, "reward.custom_reward_function.path=nowhere.py")
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "nowhere.py" in errors[0]
    assert "Traceback" not in done.stderr


def _steps(folder: Path) -> list[str]:
    return [line for file in folder.glob("runs/2*/metrics.jsonl") for line in file.read_text().splitlines()]


def _rank(folder: Path, process: str) -> int:
    (state,) = folder.glob(f"runs/2*/parts/{process.replace(':', '-')}.state.json")
    return int(json.loads(state.read_text().partition("\n")[0])["pid"])
