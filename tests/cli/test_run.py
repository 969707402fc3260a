"""``lineage run``: from nothing to a checked trace, and every mistake one line."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from omegaconf import OmegaConf
from typer.testing import CliRunner

import lineage
from lineage import hooks
from lineage.checks.formats.text import headline_lines
from lineage.cli import app, training
from lineage.cli import run as run_module
from lineage.cli.run import CONFIG_GROUPS
from lineage.errors import MissingExtraError, UserError
from lineage.trainer.config import keys
from lineage.trainer.tracking.trackers import SERVICES

# one small step: two prompts, two sessions
SMALL = [
    "trainer.total_training_steps=1",
    "data.train_batch_size=2",
    "data.max_response_length=4",
    "rollout.n=2",
]


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    """Runs ``lineage run`` in an empty folder; returns the runner's result."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LINEAGE_DISABLED", raising=False)
    before = hooks.recorder()
    yield lambda *arguments: CliRunner().invoke(app, ["run", *arguments])
    hooks.install(before)


def said(result) -> str:
    """The user's error a command ended with."""
    assert isinstance(result.exception, UserError), result.exception
    return str(result.exception)


def test_trains_traces_checks_and_says_what_next(invoke, tmp_path):
    """One command leaves a run folder with configuration, metrics and trace, a summary, a verdict and a next step."""
    result = invoke(*SMALL)
    assert result.exit_code == 0, result.output
    (latest,) = [path for path in Path("runs").iterdir() if path.is_symlink()]
    folder = latest.resolve()
    assert {path.name for path in folder.iterdir()} >= {"config.yaml", "metrics.jsonl", "trace.parquet"}
    assert OmegaConf.load(folder / "config.yaml").data.train_batch_size == 2
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1]
    trace = f"runs/{folder.name}/trace.parquet"
    assert re.search(r"^step 1/1  score \d\.\d{3}", result.output, re.M)
    assert re.search(r"^trained 1 steps, score \d\.\d{3}$", result.output, re.M)
    assert re.search(rf"^trace {trace} \(0\.\d\d MB\)$", result.output, re.M)
    assert re.search(r"^KEY001 .* pass ", result.output, re.M)
    assert f"next: lineage check {trace}" in result.output
    assert "\x1b" not in result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("data.train_files=nowhere.jsonl", r"nowhere\.jsonl: no such file"),
        pytest.param("trainer.device=cuda", r"trainer\.device=cuda: torch sees no CUDA device", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_never_began_hides_nothing(invoke, override, line):
    """A mistake found while building is the user's error; the last good run stays the latest, alone."""
    if override == "trainer.device=cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert invoke(*SMALL).exit_code == 0
    before = sorted(Path("runs").iterdir())
    assert re.search(line, said(invoke(*SMALL, override)))
    assert sorted(Path("runs").iterdir()) == before


@pytest.mark.slow
def test_runs_never_overwrite_each_other(invoke):
    """A second run has a folder of its own and becomes the latest."""
    assert invoke(*SMALL).exit_code == 0
    first = Path("runs/latest").resolve()
    assert invoke(*SMALL).exit_code == 0
    second = Path("runs/latest").resolve()
    assert first != second
    assert (first / "trace.parquet").exists()


@pytest.mark.slow
def test_the_trace_says_what_made_it(invoke):
    """The file's metadata has the seed, both hashes, the model's hashes and the resolved configuration."""
    assert invoke(*SMALL, "trainer.seed=7").exit_code == 0
    metadata = pq.read_metadata("runs/latest/trace.parquet").metadata
    run, config = (json.loads(metadata[name]) for name in (b"lineage.run", b"lineage.config"))
    assert (run["seed"], run["model"], run["mode"]) == (7, "tiny", "embedded")
    assert all(re.fullmatch(r"[0-9a-f]{64}", run[name]) for name in ("config_hash", "model_hash", "tokenizer_hash"))
    assert config["trainer"]["seed"] == 7


@pytest.mark.parametrize("how", ["trace.enabled=false", "LINEAGE_DISABLED"])
def test_untraced_run_trains_and_says_so(invoke, monkeypatch, how):
    """Tracing off by configuration or environment: the run trains, leaves no trace and names the reason."""
    overrides = [how] if "=" in how else []
    if not overrides:
        monkeypatch.setenv(how, "1")
    result = invoke(*SMALL, *overrides)
    assert result.exit_code == 0
    assert f"untraced: {how}" in result.output
    assert "trained 1 steps" in result.output
    assert not list(Path("runs/latest").rglob("*.parquet"))


@pytest.mark.slow
def test_a_batch_that_does_not_divide_is_padded(invoke):
    """B % M != 0 pads, says so, and the padding checks find something to examine and pass."""
    result = invoke(*SMALL, "data.train_batch_size=3", "actor_rollout_ref.actor.ppo_mini_batch_size=2")
    assert result.exit_code == 0, result.output
    assert "each step is padded from 6 to 8 rows" in result.output
    assert re.search(r"^PAD001 .* pass ", result.output, re.M)


@pytest.mark.slow
def test_the_built_in_reward_moves(invoke):
    """Thirty default steps lift the built-in task's mean score from chance to several times that."""
    result = invoke("trainer.total_training_steps=30", "trace.enabled=false", "--json")
    scores = json.loads(result.stdout)["scores"]
    assert sum(scores[:3]) / 3 < 0.15
    assert sum(scores[-5:]) / 5 > 0.4


@pytest.mark.slow
def test_json_is_the_only_thing_on_stdout(invoke):
    """--json prints one object; everything else goes to stderr."""
    result = invoke(*SMALL, "--json")
    summary = json.loads(result.stdout)
    assert summary["steps"] == 1
    assert len(summary["scores"]) == 1
    assert Path(summary["trace"]).stat().st_size == summary["trace_bytes"]
    assert "KEY001" in result.stderr


def test_cfg_job_prints_the_configuration_and_trains_nothing(invoke):
    """--cfg job is the resolved configuration as YAML; no run folder appears."""
    result = invoke("--cfg", "job", "model.path=smollm2")
    assert OmegaConf.create(result.stdout).actor_rollout_ref.model.path == "smollm2"
    assert not Path("runs").exists()


@pytest.mark.slow
def test_keys_without_meaning_are_named_at_the_start(invoke):
    """A verl key this version has no use for is accepted and mentioned in one line."""
    result = invoke(*SMALL, "rollout.tensor_model_parallel_size=2")
    assert result.exit_code == 0
    assert (
        "ignored: actor_rollout_ref.rollout.tensor_model_parallel_size=2 has no meaning with rollout.name=hf"
        in result.output.splitlines()
    )


def test_a_run_that_goes_on_says_where(invoke):
    """The first finds no checkpoint, the second goes on after it, the third has nothing left; steps count on."""
    shared = (
        "trainer.default_local_dir=kept",
        "trainer.save_freq=1",
        "trainer.resume_mode=auto",
        "trace.enabled=false",
    )
    outputs = [invoke(*SMALL, *shared, f"trainer.total_training_steps={steps}").output for steps in (1, 2, 2)]
    assert "no checkpoint to go on from: starts at step 1\n" in outputs[0]
    assert "goes on after step 1\n" in outputs[1]
    assert "step 2/2" in outputs[1]
    assert "trained 1 steps" in outputs[1]
    assert "goes on after step 2: nothing left to train (trainer.total_training_steps=2)\n" in outputs[2]
    assert "trained 0 steps" in outputs[2]


def test_a_service_that_does_not_start_leaves_no_run_folder(invoke, monkeypatch):
    """One line with the key, exit 2, and the last run stays the latest."""

    def broken(experiment):
        raise OSError("no server")

    monkeypatch.setitem(SERVICES, "wandb", broken)
    result = invoke(*SMALL, "trainer.logger=wandb")
    assert said(result) == "trainer.logger=wandb does not start: no server"
    assert list(Path("runs").iterdir()) == []


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.train_batch=1", "did you mean data.train_batch_size?"),
        ("mode=spark", "use one of: embedded, ray"),
        ("trainer.lineage.on_violation=stop", "use one of: raise, warn, off"),
        ("model.path=nowhere", "use one of tiny, tiny_tied, tiny_tools, smollm2 or a local folder"),
    ],
)
def test_a_mistake_leaves_no_run_folder(invoke, override, expected):
    """A configuration that cannot run is refused before anything is written."""
    assert expected in said(invoke(override))
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.train_files=absent.parquet"], "absent.parquet: no such file"),
        pytest.param(
            ["data.train_files=builtin:none"], "known: add, calculator, digits, lookup", marks=pytest.mark.slow
        ),
        pytest.param(["reward.scorer=guess"], "reward.scorer=guess is unknown", marks=pytest.mark.slow),
        pytest.param(["data.max_prompt_length=5"], "the prompt of row 0 has", marks=pytest.mark.slow),
        (["actor_rollout_ref.rollout.agent.default_agent_loop=tool_agnt"], "tool_agnt"),
    ],
)
def test_a_mistake_found_while_building_is_one_line(invoke, overrides, expected):
    """Data, task, scorer and loop mistakes end the run with their own line."""
    message = said(invoke(*SMALL, *overrides))
    assert expected in message
    assert "\n" not in message


def test_a_row_nobody_can_score_ends_the_run(invoke):
    """An unknown data_source is found in the first session and stops training with the list of known ones."""
    row = {"data_source": "mine", "prompt": [{"role": "user", "content": "1"}], "reward_model": {"ground_truth": "1"}}
    Path("rows.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    assert "no scorer for data_source 'mine'; known:" in said(invoke(*SMALL, "data.train_files=rows.jsonl"))


# a mean over no matching words: 0 / 0 from its seventh call on, which is in step 2
CORRUPT = """
calls = 0

def compute_score(data_source, solution_str, ground_truth, extra_info):
    global calls
    calls += 1
    return float("nan") if calls > 6 else calls / 6
"""
PADDED = [
    "trainer.total_training_steps=3",
    "data.train_batch_size=3",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "data.max_response_length=6",
    "rollout.n=2",
    "reward.custom_reward_function.path=corrupt.py",
]


@pytest.mark.parametrize("sidecar", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_a_corrupted_reward_function_stops_the_run_at_its_step(invoke, sidecar):
    """on_violation=raise: exit 1 at the step, the check's headline and the run folder printed, the trace whole."""
    Path("corrupt.py").write_text(CORRUPT)
    result = invoke(*PADDED, "trainer.lineage.on_violation=raise", f"trace.sidecar={sidecar}")
    assert result.exit_code == 1, result.output
    folder = Path("runs/latest").resolve()
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert f"stopped by trainer.lineage.on_violation=raise: runs/{folder.name}" in result.output
    state = json.loads(pq.read_metadata(folder / "trace.parquet").metadata[b"lineage.state"])
    report = lineage.check(folder, select=re.match(r"ViolationError: (\w+) ", state["error"])[1])
    assert (report.steps, report.state) == (2, "")
    assert report.headline.violation.global_steps == 2
    assert "\n".join(headline_lines(report.headline, report.name)) in result.output


@pytest.mark.slow
def test_a_corrupted_reward_function_is_a_warning_when_one_asks_for_it(invoke, capfd):
    """on_violation=warn: one line at the step, training goes on, and the check at the end exits 1."""
    Path("corrupt.py").write_text(CORRUPT)
    result = invoke(*PADDED, "trainer.lineage.on_violation=warn")
    assert result.exit_code == 1
    assert "trained 3 steps" in result.output
    said = [line for line in capfd.readouterr().err.splitlines() if "broken at step" in line]
    assert [re.search(r"broken at step (\d)", line)[1] for line in said] == ["2"]


@pytest.mark.slow
def test_a_checked_run_that_is_clean_says_nothing_more(invoke, capfd):
    """on_violation=raise on a clean run: the same output, exit 0."""
    result = invoke(*SMALL, "trainer.lineage.on_violation=raise")
    assert result.exit_code == 0, result.output
    assert "stopped" not in result.output
    assert capfd.readouterr().err == ""


def test_a_check_of_every_step_needs_a_trace(invoke, monkeypatch):
    """A run that is not traced is not checked, and never pretends to be: one line, nothing written."""
    wanted = "trainer.lineage.on_violation=warn"
    assert "and trace.enabled=false: trace, or set it off" in said(invoke(*SMALL, wanted, "trace.enabled=false"))
    monkeypatch.setenv("LINEAGE_DISABLED", "1")
    assert "and LINEAGE_DISABLED is set: trace, or set it off" in said(invoke(*SMALL, wanted))
    assert not Path("runs").exists()


@pytest.mark.slow
def test_a_check_of_some_steps_says_so(invoke):
    """With trace.every only the traced steps are seen."""
    result = invoke("--cfg", "job", "trainer.lineage.on_violation=warn")
    assert OmegaConf.create(result.stdout).trainer.lineage.on_violation == "warn"
    result = invoke(*SMALL, "trainer.lineage.on_violation=warn", "trace.every=2")
    assert "warning: trainer.lineage.on_violation=warn sees one step in 2 (trace.every)" in result.output


def test_missing_torch_is_the_pip_line(invoke, monkeypatch):
    """Without the train extra the error names the package and the line that installs it."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else real(name))
    result = invoke()
    assert isinstance(result.exception, MissingExtraError)
    assert 'pip install "rl-lineage[train]"' in str(result.exception)


@pytest.mark.slow
def test_interrupt_leaves_a_readable_trace(invoke, monkeypatch):
    """Ctrl-C exits 130 after sealing what there is."""

    def interrupt(self, metrics, step):
        raise KeyboardInterrupt

    monkeypatch.setattr("lineage.trainer.tracking.loggers.Tracking.log", interrupt)
    result = invoke(*SMALL, "trainer.total_training_steps=2")
    assert result.exit_code == 130, result.output
    assert "interrupted after" in result.output
    state = json.loads(pq.read_metadata("runs/latest/trace.parquet").metadata[b"lineage.state"])
    assert state["closed"] is False
    assert 1 in state["steps"]


def test_another_error_is_not_hidden(invoke, monkeypatch):
    """A fault of the program shows as itself, with the recorder closed."""

    async def broken(*arguments):
        raise RuntimeError("a bug")

    monkeypatch.setattr(training, "_train", broken)
    result = invoke(*SMALL)
    assert isinstance(result.exception, RuntimeError)
    assert len(list(Path("runs").iterdir())) == 1


def test_help_lists_every_group_with_keys_that_exist(invoke):
    """--help names the configuration groups, and each key it names is one of the tree."""
    result = invoke("--help")
    known = {name for name, _, _ in keys()}
    for group, names in CONFIG_GROUPS.items():
        assert group in result.output
        assert {f"{group}.{name}" for name in names} <= known
    sections = {name.partition(".")[0] for name in known if "." in name}
    assert sections == {group.partition(".")[0] for group in CONFIG_GROUPS}


def test_help_needs_no_torch():
    """The command line and its help come up without importing torch or hydra."""
    code = (
        "import sys; from typer.testing import CliRunner; from lineage.cli import app;"
        "assert CliRunner().invoke(app, ['run', '--help']).exit_code == 0;"
        "sys.exit('torch' in sys.modules or 'hydra' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_long_runs_show_a_dozen_scores():
    """The summary of a long run shows evenly spaced scores, the first and the last among them."""
    assert list(run_module._ends([0.5, 0.25])) == [0.5, 0.25]
    shown = run_module._ends([float(step) for step in range(100)])
    assert (len(shown), shown[0], shown[-1]) == (12, 0.0, 99.0)
