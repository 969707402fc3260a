"""lineage.testing: a block of a test is recorded, and cannot be asserted on when nothing was."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pandas  # noqa: F401 - pytester forgets what an inner session imports, and C extensions load once a process
import pytest

from lineage import hooks
from lineage.errors import RecorderError
from lineage.testing import Recording, assert_invariants, assert_violates, record
from lineage.traces import open_trace

pytest_plugins = ("pytester",)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "testing.md").read_text("utf-8")
BAD = ROOT / "traces" / "samples" / "bad" / "MSK002.parquet"
KEYS, MASK = ["q7_0_0", "q7_1_0"], [[1, 1], [1]]


def loop(recorder: Any, mask: list[list[int]] = MASK) -> None:
    """One step of a loop, into this recorder."""
    recorder.step(1)
    with recorder.stage("rollout", producer="engine", consumer="trainer") as stage:
        stage.produce({"responses": [[11, 12], [13]], "response_mask": MASK}, keys=KEYS)
    with recorder.stage("advantage", producer="trainer") as stage:
        stage.produce({"advantages": [[0.5, 0.5], [-0.5]]}, keys=KEYS, mask=mask)
    recorder.seal()


def test_lines_of_a_test_are_recorded_and_judged() -> None:
    """By the verbs of the recording; a fault in them is caught."""
    with record() as recording:
        loop(recording)
    assert_invariants(recording, select=["KEY", "MSK"], require=["KEY001", "MSK002"])
    with record() as recording:
        loop(recording, mask=[[1, 0], [1]])
    assert_violates(recording, "MSK002", stage="advantage", key="q7_0_0")


def test_code_that_knows_only_the_hooks_is_recorded() -> None:
    """The recording's recorder is the active one in the block, and the one before it afterwards, whatever happens."""
    with record() as outer:
        before = hooks.recorder()
        with contextlib.suppress(ZeroDivisionError), record() as inner:
            loop(hooks.recorder())
            hooks.install(hooks.NULL_RECORDER)
            raise ZeroDivisionError
        assert hooks.recorder() is before
        loop(hooks.recorder())
    assert not hooks.recorder().enabled
    assert_invariants(outer, select=["KEY001", "MSK002"])
    with open_trace(inner.trace) as trace:
        assert (trace.state.closed, trace.state.why) == (False, "ZeroDivisionError")


def test_the_trace_lies_in_the_folder_that_is_given(tmp_path: Path) -> None:
    """It stays there, and one folder holds one."""
    with record(tmp_path / "run", run_id="mine", profile="verl") as recording:
        loop(recording)
    assert recording.trace == tmp_path / "run" / "trace.parquet"
    with open_trace(recording.trace) as trace:
        assert (trace.metadata["run"]["run_id"], trace.profile) == ("mine", "verl")
    with pytest.raises(RecorderError, match="already holds a trace"), record(tmp_path / "run"):
        pass


def test_a_temporary_folder_goes_with_the_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there as long as somebody can ask for the trace; one that could not begin leaves none."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with record() as recording:
        loop(recording)
    assert [recording.trace.parent] == list(tmp_path.iterdir())
    del recording
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RecorderError, match="every=0"), record(every=0):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_recording_that_still_runs_has_no_trace_yet() -> None:
    """An assertion inside the block is a mistake."""
    with record() as recording:
        loop(recording)
        with pytest.raises(RecorderError, match="after its with block"):
            assert_invariants(recording)


def nothing(recording: Recording) -> None:
    """A block that records nothing."""


def unreadable(recording: Recording) -> None:
    """A block whose only batch has a row too few."""
    recording.step(1)
    with recording.stage("rollout") as stage:
        stage.produce({"responses": [[1]]}, keys=KEYS)


@pytest.mark.parametrize("block", [nothing, unreadable])
def test_a_block_that_recorded_nothing_cannot_be_asserted_on(block: Any) -> None:
    """It would hold whatever the code does."""
    with record() as recording:
        block(recording)
    with pytest.raises(RecorderError, match="nothing was recorded"):
        assert_invariants(recording)


def test_a_lost_row_makes_the_recording_incomplete() -> None:
    """The assertion says which row and why."""
    with record() as recording:
        loop(recording)
        recording.step(2)
        unreadable(recording)
    with pytest.raises(AssertionError, match=r"^incomplete trace: .*2 keys for 1 rows of responses"):
        assert_invariants(recording, select="KEY001")


def test_a_switched_off_recorder_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither LINEAGE_DISABLED nor enabled=False makes a test that asserts on nothing."""
    with pytest.raises(RecorderError, match="tracing is off"), record(enabled=False):
        pass
    monkeypatch.setenv("LINEAGE_DISABLED", "1")
    with pytest.raises(RecorderError, match="unset LINEAGE_DISABLED"), record():
        pass


def examples() -> dict[str, str]:
    """The files of docs/testing.md."""
    return dict(re.findall(r"^`(\w+\.py)`[^\n]*:\n\n```python\n(.*?)^```$", PAGE, re.M | re.S))


@pytest.mark.slow
def test_the_examples_of_the_page_run(pytester: pytest.Pytester) -> None:
    """Every file the page shows, in a suite with a good trace."""
    for name, text in examples().items():
        (pytester.path / name).write_text(text)
    good = ROOT / "traces" / "samples" / "good.parquet"
    pytester.runpytest(f"--lineage-trace={good}").assert_outcomes(passed=5)


def anywhere(text: str) -> str:
    """A report without what another run of the same fault says otherwise: uids, places in the trace, fingerprints."""
    return re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?<=seq )\d+|(?<=fingerprint )[0-9a-f]+", "...", text)


@pytest.mark.slow
def test_the_failure_the_page_shows_is_the_one_pytest_prints(pytester: pytest.Pytester) -> None:
    """Line by line, and the line at the end."""
    (pytester.path / "test_run.py").write_text(examples()["test_run.py"])
    (pytester.mkdir("runs") / "latest").symlink_to(BAD)
    done = pytester.runpytest("--lineage-trace=runs/latest")
    done.assert_outcomes(passed=1, failed=1)
    blocks = [text for language, text in re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.M | re.S) if not language]
    assert len(blocks) == 2
    for shown in blocks:
        assert anywhere(shown) in anywhere(done.stdout.str() + "\n")
