"""A step that was begun and never sealed says what it lacks, next to the step before it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from lineage import hooks
from lineage.cli import app
from lineage.recorder import Recorder
from lineage.run import RunInfo
from lineage.traces import open_trace
from lineage.traces.torn import lacks

KEYS = ["u_0_0", "u_1_0"]


def record(folder, processes, died):
    """A run of one whole step and a torn one.

    Args:
        processes: stages of each process in a whole step.
        died: how many of them each came through in the torn step.
    """
    recorders = {name: Recorder(folder, RunInfo("torn", "lineage", {}, {}), process=name) for name in processes}
    for step in (1, 2):
        for name, stages in processes.items():
            hooks.install(recorders[name])
            recorders[name].step(step)
            for stage in stages if step == 1 else stages[: died[name]]:
                with hooks.traced(stage, component=name):
                    hooks.current().produce({"responses": [[1], [2]]}, keys=KEYS)
        if step == 1:
            for recorder in recorders.values():
                recorder.seal()
    for recorder in recorders.values():
        recorder.close("ProcessDiedError: actor:1 is gone")
    hooks.install(hooks.NullRecorder())
    return folder


@pytest.fixture
def torn(tmp_path):
    """The driver waits for ranks, one of which died in the update."""
    stages = {"driver": ["rollout", "advantage", "metrics"], "actor:0": ["update_actor"], "actor:1": ["update_actor"]}
    return record(tmp_path / "run", stages, {"driver": 2, "actor:0": 1, "actor:1": 0})


def test_the_first_event_that_is_missing_is_named(torn):
    """The process that stopped, the event it did not come to, and the stages nobody came to."""
    with open_trace(torn) as trace:
        (lack,) = lacks(trace)
    assert (lack.step, lack.beside) == (2, 1)
    assert dict(lack.ends) == {"driver": ("metrics", "produce", "responses")}
    assert lack.first == ("metrics", "produce", "responses")
    assert lack.silent == ("actor:1",)
    assert lack.stages == ("metrics",)
    said = lack.sentence()
    assert said.startswith("step 2 next to step 1: ")
    assert "actor:1 left nothing; driver ends before metrics produce responses" in said
    assert "no process has metrics" in said


def test_check_and_info_say_so(torn):
    """The report of an incomplete trace carries the sentence; its exit code is that of an incomplete one."""
    checked = CliRunner().invoke(app, ["check", "-q", str(torn)])
    assert checked.exit_code == 3
    assert "note: step 2 next to step 1: " in checked.output
    info = json.loads(CliRunner().invoke(app, ["info", str(torn), "--json"]).output)
    assert info["lacks"][0]["silent"] == ["actor:1"]


def test_a_whole_trace_lacks_nothing(tmp_path):
    """And of a torn first step nothing can be said: there is none to hold it against."""
    with hooks.recording(tmp_path / "whole", run_id="whole") as recorder:
        recorder.step(1)
        with hooks.traced("rollout"):
            hooks.current().produce({"responses": [[1], [2]]}, keys=KEYS)
        recorder.seal()
    with open_trace(tmp_path / "whole") as trace:
        assert list(lacks(trace)) == []
    recorder = Recorder(tmp_path / "first", RunInfo("first", "lineage", {}, {}))
    hooks.install(recorder)
    recorder.step(1)
    with hooks.traced("rollout"):
        hooks.current().produce({"responses": [[1], [2]]}, keys=KEYS)
    recorder.close("killed")
    hooks.install(hooks.NullRecorder())
    with open_trace(tmp_path / "first") as trace:
        assert trace.state.torn == (1,)
        assert list(lacks(trace)) == []
