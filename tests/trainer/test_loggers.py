"""Metrics out: plain lines in a pipe, one JSON object a step in the run folder."""

from __future__ import annotations

import io
import json

from rich.console import Console

from lineage.trainer.loggers import METRICS_FILE, Tracking

METRICS = {"critic/score/mean": 0.25, "actor/grad_norm": float("nan"), "timing_s/step": 0.5}


def run(folder, names, **console):
    """Two steps through a Tracking that prints to a buffer; returns the tracking and what it printed."""
    text = io.StringIO()
    with Tracking(names, folder, console=Console(file=text, highlight=False, **console)) as tracking:
        tracking.begin(2)
        tracking.log(METRICS, 1)
        tracking.log({"critic/score/mean": 0.5}, 2)
    return tracking, text.getvalue()


def test_piped_console_prints_plain_lines(tmp_path):
    """One line a step without an escape code; a metric that was not logged is not shown."""
    _, text = run(tmp_path, ["console"])
    assert text.splitlines() == ["step 1/2  score 0.250  grad nan  s 0.50", "step 2/2  score 0.500"]


def test_terminal_gets_the_same_lines_and_a_bar(tmp_path):
    """On a terminal the steps' lines are there too, around a progress bar."""
    _, text = run(tmp_path, ["console"], force_terminal=True, width=100)
    assert "step 2/2  score 0.500" in text
    assert "training" in text


def test_jsonl_has_one_object_a_step(tmp_path):
    """The file holds every metric by verl's name; NaN, which JSON lacks, is null."""
    run(tmp_path, ["jsonl"])
    lines = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert lines[0] == {"step": 1, "critic/score/mean": 0.25, "actor/grad_norm": None, "timing_s/step": 0.5}
    assert lines[1]["step"] == 2


def test_a_line_is_on_disk_before_the_run_ends(tmp_path):
    """A killed run keeps the steps it logged."""
    with Tracking(["jsonl"], tmp_path) as tracking:
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
    with Tracking(["jsonl"], tmp_path) as tracking:
        tracking.begin(2)
        (jsonl,) = tracking._loggers
        jsonl._file = open("/dev/full", "a")  # noqa: SIM115 - the logger closes it
        tracking.log(METRICS, 1)
        tracking.log(METRICS, 2)
    assert "metrics end before step 1" in caplog.text
    assert [step for step, _ in tracking.history] == [1, 2]
