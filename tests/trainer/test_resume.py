"""Stop and go on: a run that was resumed is, from there, the run that never stopped."""

from __future__ import annotations

import asyncio
import functools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import duckdb
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

from lineage import hooks
from lineage.checks import check
from lineage.cli import app
from lineage.trainer.checkpoint import LATEST, CheckpointError, saved_steps
from lineage.trainer.config import ConfigError, compose, resolved, validate_config
from lineage.trainer.grpo import PPOTrainerSync

# 8 rows, 4 a step: step 3 begins the second epoch
TINY = (
    "data.train_batch_size=4",
    "data.train_max_samples=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.shuffle=true",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "actor_rollout_ref.rollout.n=2",
    "data.max_response_length=6",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.horizon=20",
    f"reward.custom_reward_function.path={Path(__file__).with_name('noisy_scorer.py')}",
)
STEPS = 4

# A new process has a new queue and a new cache: their counters begin again. Times are in the metrics, and a row of the
# log-prob worker is linked to its parent by event number.
SAME = """
    select * exclude (run_id, time_ns, seq, process, parent, slot, weights), weights.version, weights.phase
    from read_parquet('{}') where global_steps > {} and field <> 'metrics'
"""


def run(folder, *overrides, steps=STEPS, base=TINY):
    """Train with a trace in ``folder``; returns the trainer."""
    config = compose([*base, f"trainer.total_training_steps={steps}", *overrides])
    validate_config(config)
    trainer = PPOTrainerSync(config, folder=folder)

    async def go():
        await trainer.init()
        await trainer.fit()

    with hooks.recording(folder, config=resolved(config), run={}):
        asyncio.run(go())
    return trainer


def shared(folder):
    """Overrides of a run that goes on from what others saved in a folder."""
    return f"trainer.default_local_dir={folder}", "trainer.resume_mode=auto", "trainer.save_freq=1"


def weights(trainer):
    """The actor's parameters as one vector."""
    return torch.cat([tensor.reshape(-1).float() for _, tensor in trainer.parts.worker.state_dict()])


def saved_weights(folder):
    """The model's tensors in a checkpoint, by name."""
    reader = dcp.FileSystemReader(folder / "actor")
    kinds = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.empty(kind.size, dtype=kind.properties.dtype) for name, kind in kinds.items()}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}


def differing_rows(first, second, after):
    """Rows about the steps after ``after`` that only one of two traces has, and how many each has."""
    left, right = (SAME.format(folder / "trace.parquet", after) for folder in (first, second))
    con = duckdb.connect()
    counts = [con.execute(f"select count(*) from ({side})").fetchall()[0][0] for side in (left, right)]
    apart = con.execute(f"(({left}) except all ({right})) union all (({right}) except all ({left}))").fetchall()
    return apart, counts


def prompt_order(folder, after):
    """Dataset rows and uids in the order they were submitted."""
    table = pq.read_table(folder / "trace.parquet", columns=["global_steps", "seq", "stage", "op", "key", "field"])
    rows = table.filter((pc.field("stage") == "prompt") & (pc.field("op") == "produce")).to_pylist()
    later = sorted((row for row in rows if row["global_steps"] > after), key=lambda row: row["seq"])
    return [key for row in later for key in row["key"]]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The run that never stops; it looks for a checkpoint, finds none, and saves after every step."""
    folder = tmp_path_factory.mktemp("straight")
    return folder, run(folder, *shared(folder / "checkpoints"))


@pytest.fixture(scope="module")
def resume(straight, tmp_path_factory):
    """Go on from a checkpoint of the straight run, once each; gives the folder and the trainer."""

    @functools.cache
    def from_step(stop):
        folder = tmp_path_factory.mktemp("resumed")
        path = straight[0] / "checkpoints" / f"global_step_{stop}"
        overrides = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}", "trainer.save_freq=1")
        return folder, run(folder, *overrides)

    return from_step


@pytest.mark.parametrize("stop", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resumed_run_is_the_run_that_never_stopped(straight, resume, stop):
    """From inside an epoch and from its end: weights, prompts, coefficient and every row of the trace are the same."""
    (folder, trainer), (other, resumed) = straight, resume(stop)
    assert torch.equal(weights(trainer), weights(resumed))
    assert resumed.parts.kl_controller.value == trainer.parts.kl_controller.value != 0.001
    assert prompt_order(other, stop) == prompt_order(folder, stop)
    apart, (here, there) = differing_rows(folder, other, stop)
    assert apart == []
    assert here == there > 100


def test_saving_changes_nothing(straight, tmp_path):
    """After a step that followed a save the weights are those of a run that never saves."""
    never = run(tmp_path, f"actor_rollout_ref.actor.optim.total_training_steps={STEPS}", steps=2)
    saved = saved_weights(straight[0] / "checkpoints" / "global_step_2")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in never.parts.worker.state_dict())


def test_a_resumed_trace_begins_after_the_checkpoint_and_is_clean(resume):
    """Step 0 says what was loaded, versions begin there, and no code about them or the draws fails."""
    trace = resume(2)[0] / "trace.parquet"
    table = pq.read_table(trace)
    assert sorted(pc.unique(table["global_steps"]).to_pylist()) == [0, 3, 4]
    loaded = table.filter(pc.field("field") == "_load_checkpoint").to_pylist()
    place = {"resume_mode": "resume_path", "global_steps": "2", "epoch": "0", "drawn": "8", "optimizer_steps": "4"}
    assert [dict(row["attrs"]) for row in loaded] == [place]
    synced = table.filter((pc.field("op") == "sync") & (pc.field("global_steps") == 0)).to_pylist()
    assert {row["weights"]["version"] for row in synced} == {2}
    seen = ("KEY001", "KEY002", "KEY005", "KEY007", "LOS003", "QUE002", "VER001", "VER002", "VER003", "VER006")
    assert {one.code: str(one.kind) for one in check(trace, select=seen).verdicts} == dict.fromkeys(seen, "pass")


def test_runs_share_a_folder_by_auto(straight, tmp_path):
    """The first found nothing and began; one that finds three steps does the fourth; another has nothing left to do."""
    folder, trainer = straight
    assert prompt_order(folder, 0) != prompt_order(folder, 1)
    shutil.copytree(folder / "checkpoints", tmp_path / "ckpt")
    shutil.rmtree(tmp_path / "ckpt" / f"global_step_{STEPS}")
    (tmp_path / "ckpt" / LATEST).write_text(str(STEPS - 1))
    again = run(tmp_path / "again", *shared(tmp_path / "ckpt"))
    assert prompt_order(tmp_path / "again", 0) == prompt_order(folder, STEPS - 1)
    assert again.global_steps == STEPS
    assert saved_steps(tmp_path / "ckpt") == [1, 2, 3, 4]
    idle = run(tmp_path / "idle", *shared(tmp_path / "ckpt"))
    assert torch.equal(weights(idle), weights(again))
    assert torch.equal(weights(idle), weights(trainer))
    assert prompt_order(tmp_path / "idle", 0) == []


def test_other_data_is_refused_and_nothing_is_overwritten(straight, tmp_path):
    """A run with other prompts says which key differs, before it saves anything."""
    saved = straight[0] / "checkpoints"
    before = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=r"data\.train_max_samples=8, this run has 12"):
        run(tmp_path, *shared(saved), "data.train_max_samples=12", steps=STEPS + 1)
    assert {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()} == before


def test_a_fixed_coefficient_is_this_runs_own_and_the_batches_of_a_step_are_shared(tmp_path):
    """What the configuration fixes is no state; how many batches a step has is the schedule's measure of time."""
    fixed = ("algorithm.kl_ctrl.type=fixed", f"trainer.default_local_dir={tmp_path}/ckpt", "trainer.resume_mode=auto")
    run(tmp_path / "first", *fixed, "algorithm.kl_ctrl.kl_coef=0.5", "trainer.save_freq=1", steps=1)
    second = run(tmp_path / "second", *fixed, "algorithm.kl_ctrl.kl_coef=0.01", steps=1)
    assert (second.global_steps, second.parts.kl_controller.value) == (1, 0.01)
    with pytest.raises(CheckpointError, match=r"saved with trainer\.v1\.sync\.parameter_sync_step=1, this run has 2"):
        run(tmp_path / "third", *fixed, "trainer.v1.sync.parameter_sync_step=2", steps=2)


def test_what_resuming_needs_is_asked_before_the_run():
    """A path that is missing is an error; keys that have no effect are a warning each."""
    with pytest.raises(ConfigError, match=r"needs trainer\.resume_from_path"):
        validate_config(compose(["trainer.resume_mode=resume_path"]))
    (line,) = validate_config(compose(["trainer.resume_mode=auto"]))
    assert "without trainer.default_local_dir" in line
    (line,) = validate_config(compose(["trainer.resume_from_path=x/global_step_1"]))
    assert "is not read" in line


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs the command line in a folder of the test's own; returns what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LINEAGE_DISABLED", raising=False)
    before = hooks.recorder()

    def run_command(*words):
        done = CliRunner().invoke(app, words)
        hooks.install(before)
        assert done.exit_code == 0, done.output
        return done.output

    return run_command


@pytest.mark.slow
def test_five_and_five_steps_are_ten(command, tmp_path):
    """By the command line: stopped after step 5 and resumed to 10, the traces agree in key, length and fingerprint."""
    mini = "actor_rollout_ref.actor.ppo_mini_batch_size=2"
    sizes = ("data.train_batch_size=4", "data.max_response_length=6", "rollout.n=2", mini)
    five, ten = ((f"trainer.total_training_steps={steps}", *sizes) for steps in (5, 10))
    command("run", *ten, "trainer.default_local_dir=whole", "trainer.save_freq=10")
    halves = ("trainer.default_local_dir=halves", "trainer.save_freq=5", "trainer.resume_mode=auto")
    command("run", *five, *halves)
    onwards = [sys.executable, "-c", "from lineage.cli import main; main()", "run", *ten, *halves]
    subprocess.run(onwards, check=True, capture_output=True)  # in another process: nothing is left of the first half
    first, _, resumed = sorted(path for path in (tmp_path / "runs").iterdir() if not path.is_symlink())
    apart, (here, there) = differing_rows(first, resumed, 5)
    assert apart == []
    assert here == there > 300
    whole, joined = (saved_weights(tmp_path / name / "global_step_10") for name in ("whole", "halves"))
    assert all(torch.equal(tensor, joined[name]) for name, tensor in whole.items())
    assert re.search(r"steps +6\.\.10", command("info", str(resumed)))


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["lora_ref", "merged_steps", "failures", "tools"])
def test_every_kind_of_run_can_go_on(tmp_path, experiment):
    """An adapter, several updates a sync, failing sessions and tools: two steps are one and one."""
    base = (f"+experiment={experiment}", "trainer.save_freq=1")
    trainer = run(tmp_path / "whole", steps=2, base=base)
    path = f"trainer.resume_from_path={tmp_path}/whole/checkpoints/global_step_1"
    resumed = run(tmp_path / "half", "trainer.resume_mode=resume_path", path, steps=2, base=base)
    assert torch.equal(weights(trainer), weights(resumed))
    apart, (here, there) = differing_rows(tmp_path / "whole", tmp_path / "half", 1)
    assert apart == []
    assert here == there > 100
    assert all(str(verdict.kind) != "fail" for verdict in check(tmp_path / "half" / "trace.parquet").verdicts)
