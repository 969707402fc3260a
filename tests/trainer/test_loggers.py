"""Metrics out: plain lines in a pipe, one JSON object a step in the run folder, and services when asked for."""

from __future__ import annotations

import io
import json
import os
import sqlite3
import subprocess
import sys
from importlib.machinery import PathFinder
from typing import ClassVar

import pytest
from rich.console import Console

from lineage.hooks import MissingExtraError
from lineage.trainer.tracking.dump import Sample
from lineage.trainer.tracking.loggers import METRICS_FILE, LoggerError, Tracking
from lineage.trainer.tracking.trackers import SERVICES, Experiment, need_modules

METRICS = {"critic/score/mean": 0.25, "actor/grad_norm": float("nan"), "timing_s/step": 0.5, "training/global_step": 1}
VALIDATION = {"val-core/builtin/add/acc/mean@4": 0.5, "val-aux/builtin/add/reward/mean@4": 0.5}


def run(folder, names, **console):
    """Two steps through a Tracking that prints to a buffer; returns the tracking and what it printed."""
    text = io.StringIO()
    with Tracking(names, Experiment(folder), Console(file=text, highlight=False, **console)) as tracking:
        tracking.begin(2)
        tracking.log(METRICS, 1)
        tracking.log({"critic/score/mean": 0.5, "training/global_step": 2}, 2)
    return tracking, text.getvalue()


class Broken:
    """A service that fails in the way it is told to."""

    calls: ClassVar[list[str]] = []

    def __init__(self, experiment):
        if experiment.name == "start":
            raise OSError("no server\nat all")

    def log(self, metrics, step):
        raise RuntimeError("connection lost")

    def close(self, failed=False):
        self.calls.append("failed" if failed else "closed")
        raise RuntimeError("still lost")


@pytest.fixture
def broken(monkeypatch):
    """wandb is a service that does not work."""
    monkeypatch.setitem(SERVICES, "wandb", Broken)
    monkeypatch.setattr(Broken, "calls", [])


def test_piped_console_prints_plain_lines(tmp_path):
    """One line a step without an escape code; a metric that was not logged is not shown."""
    _, text = run(tmp_path, ["console"])
    assert text.splitlines() == ["step 1/2  score 0.250  grad nan  s 0.50", "step 2/2  score 0.500"]


def test_terminal_gets_the_same_lines_and_a_bar(tmp_path):
    """On a terminal the steps' lines are there too, around a progress bar."""
    _, text = run(tmp_path, ["console"], force_terminal=True, width=100)
    assert "step 2/2  score 0.500" in text
    assert "training" in text


def test_a_validation_is_shown_by_its_headline_and_some_answers(tmp_path):
    """The console says val-core's mean and prints the answers asked for; a step before the first is no step trained."""
    text = io.StringIO()
    with Tracking(["console"], Experiment(tmp_path), Console(file=text, highlight=False, width=200)) as tracking:
        tracking.begin(4)
        tracking.log_generations([Sample("u_0_0", "1+1=?", "[b]2", "2", 1.0, 5, 1)], 0)
        tracking.log(VALIDATION, 0)
        tracking.log(METRICS, 1)
    assert text.getvalue().splitlines()[:2] == [
        "val 0  '1+1=?' -> '[b]2'  1.000",
        "step 0/4  val-core/builtin/add/acc/mean@4 0.500",
    ]
    assert tracking.steps == 1


def test_jsonl_has_one_object_a_step(tmp_path):
    """The file holds every metric by verl's name; NaN, which JSON lacks, is null."""
    run(tmp_path, ["jsonl"])
    lines = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert lines[0] == {"step": 1, **METRICS, "actor/grad_norm": None}
    assert lines[1]["step"] == 2


def test_a_line_is_on_disk_before_the_run_ends(tmp_path):
    """A killed run keeps the steps it logged."""
    with Tracking(["jsonl"], Experiment(tmp_path)) as tracking:
        tracking.log(METRICS, 1)
        assert len((tmp_path / METRICS_FILE).read_text().splitlines()) == 1


def test_only_the_named_loggers_run(tmp_path):
    """Without jsonl no file is made, without console nothing is printed; the history is kept all the same."""
    tracking, text = run(tmp_path, [])
    assert text == ""
    assert list(tmp_path.iterdir()) == []
    assert tracking.values("critic/score/mean") == [0.25, 0.5]
    assert tracking.values("absent") == []


def test_a_full_disk_ends_the_file_and_not_the_training(tmp_path, caplog):
    """A line the disk refuses is a warning; later steps are still tracked."""
    with Tracking(["jsonl"], Experiment(tmp_path)) as tracking:
        tracking.begin(2)
        jsonl = tracking._loggers["jsonl"]
        jsonl._file = open("/dev/full", "a")  # noqa: SIM115 - the logger closes it
        tracking.log(METRICS, 1)
        tracking.log(METRICS, 2)
    assert "metrics end before step 1" in caplog.text
    assert [step for step, _ in tracking.history] == [1, 2]


def test_a_service_that_fails_is_left_out_and_the_others_go_on(tmp_path, broken, caplog):
    """One warning; it is closed as failed, once, and what its closing raises stops nothing."""
    run(tmp_path, ["wandb", "jsonl"])
    assert caplog.text.count("trainer.logger=wandb ends before step 1: connection lost") == 1
    assert Broken.calls == ["failed"]
    assert len((tmp_path / METRICS_FILE).read_text().splitlines()) == 2


def test_a_service_that_does_not_start_stops_the_run(tmp_path, broken):
    """One line with the key; what had started is closed."""
    with pytest.raises(LoggerError, match=r"^trainer\.logger=wandb does not start: no server$"):
        Tracking(["jsonl", "wandb"], Experiment(tmp_path, name="start"))


@pytest.mark.parametrize("failed", [False, True])
def test_loggers_learn_how_the_run_ended(tmp_path, broken, failed):
    """An error closes them as failed, and stays the error."""
    tracking = Tracking(["wandb"], Experiment(tmp_path))
    if failed:
        with pytest.raises(ZeroDivisionError), tracking:
            raise ZeroDivisionError
    else:
        with tracking:
            pass
    assert Broken.calls == ["failed" if failed else "closed"]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_a_missing_package_is_the_pip_line(name, monkeypatch):
    """A folder of that name beside the script, such as a service leaves behind, is not the package."""

    class Folder:
        origin = None

    monkeypatch.setattr(PathFinder, "find_spec", lambda module: Folder())
    with pytest.raises(
        MissingExtraError, match=rf"trainer\.logger={name} needs the 'loggers' extra.*rl-lineage\[loggers\]"
    ):
        need_modules(["console", name])


@pytest.mark.slow
def test_loggers_import_no_service():
    """Each is imported when it is asked for."""
    services = "{'wandb', 'mlflow', 'trackio', 'tensorboard'}"
    code = f"import sys, lineage.trainer.tracking.loggers as _; print({services} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# ------------------------------------------------------------------------------------------------- the real services

# run in a process of its own: they keep global state, threads and what they read of the environment
_RUN = """
import socket, sys
from pathlib import Path
from lineage.trainer.tracking.loggers import Tracking
from lineage.trainer.tracking.trackers import Experiment

real = socket.socket.connect
def connect(self, address):
    local = self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1", "localhost")
    assert local, f"network: {address}"
    return real(self, address)
socket.socket.connect = connect

config = {"trainer": {"seed": 42, "logger": [sys.argv[1]]}, **{f"key{n}": n for n in range(150)}}
with Tracking([sys.argv[1]], Experiment(Path(sys.argv[2]), "project", "experiment", config)) as tracking:
    tracking.log({"critic/score/mean": 0.25, "actor/grad_norm": float("nan")}, 1)
    tracking.log({"critic/score/mean": 0.5, "val-core/builtin/add/acc/mean@4": 0.5}, 2)
"""


@pytest.fixture
def service(tmp_path):
    """Log two steps to a real service; returns the run folder, in which all of its files are."""

    def log(name):
        folder = tmp_path / "run"
        folder.mkdir()
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "MLFLOW", "TRACKIO"))}
        done = subprocess.run(
            [sys.executable, "-c", _RUN, name, str(folder)],
            cwd=tmp_path,
            env={**kept, "HOME": str(tmp_path / "home")},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert "WARNING" not in done.stderr.upper().replace("USERWARNING", ""), done.stderr
        assert done.stdout == ""
        assert [path.name for path in tmp_path.iterdir() if path.name not in ("run", "home")] == []
        return folder

    return log


@pytest.mark.slow
def test_tensorboard_reads_back_what_was_logged(service):
    """Event files in the run folder hold every scalar and the configuration."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(service("tensorboard") / "tensorboard"))
    events.Reload()
    assert [(scalar.step, scalar.value) for scalar in events.Scalars("critic/score/mean")] == [(1, 0.25), (2, 0.5)]
    assert "config/text_summary" in events.Tags()["tensors"]


@pytest.mark.slow
def test_wandb_is_offline_without_a_key(service):
    """Its run lies in the run folder, to be synced by who wants to."""
    (record,) = (service("wandb") / "wandb").glob("offline-run-*/run-*.wandb")
    content = record.read_bytes()
    assert b"critic/score/mean" in content
    assert b"experiment" in content


@pytest.mark.slow
def test_mlflow_has_a_file_store_in_the_run_folder(service, monkeypatch):
    """Metrics by step, the configuration flat, the run finished; @ is _at_."""
    place = (service("mlflow") / "mlruns").as_uri()
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=place)
    project = client.get_experiment_by_name("project")
    (found,) = client.search_runs([project.experiment_id])
    assert (found.info.run_name, found.info.status) == ("experiment", "FINISHED")
    assert found.data.metrics == {"critic/score/mean": 0.5, "val-core/builtin/add/acc/mean_at_4": 0.5}
    assert found.data.params["trainer.seed"] == "42"
    assert len(found.data.params) == 152
    history = client.get_metric_history(found.info.run_id, "critic/score/mean")
    assert [(point.step, point.value) for point in history] == [(1, 0.25), (2, 0.5)]


@pytest.mark.slow
def test_trackio_keeps_its_database_in_the_run_folder(service):
    """Each step's metrics, under the project's name."""
    (path,) = (service("trackio") / "trackio").glob("project*.db")
    with sqlite3.connect(path) as con:
        rows = con.execute("select step, metrics from metrics order by step").fetchall()
    assert [step for step, _ in rows] == [1, 2]
