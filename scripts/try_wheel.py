"""Try the installed package as other people's CI does: by the command line, and in a pytest project of its own.

    <python of an environment with the wheel and pytest, without torch> scripts/try_wheel.py

Exits 1, with what was printed, at the first trial that ends otherwise than it should: a good trace passes, a bad one
fails with its headline.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

SUITE = """
import sys

from lineage.testing import assert_invariants, assert_violates, record


def test_the_run_keeps_its_contracts(lineage_trace):
    assert_invariants(lineage_trace, require=["MSK002"])


def test_lines_of_this_suite():
    keys = ["q7_0_0", "q7_1_0"]
    with record() as recording:
        recording.step(1)
        with recording.stage("rollout", producer="engine") as stage:
            stage.produce({"responses": [[11, 12], [13]], "response_mask": [[1, 1], [1]]}, keys=keys)
        with recording.stage("advantage", producer="trainer") as stage:
            stage.produce({"advantages": [[0.5, 0.5], [-0.5]]}, keys=keys, mask=[[1, 0], [1]])
        recording.seal()
    assert_violates(recording, "MSK002", stage="advantage")
    assert "torch" not in sys.modules
"""
HEADLINE = "MSK002 consumers use the rollout's mask: first broken at step 2, stage update_actor"


def main() -> None:
    """Run the trials."""
    if importlib.util.find_spec("torch") is not None:
        sys.exit("torch is installed here: the wheel is to be tried without it")
    import lineage.traces

    samples = Path(lineage.traces.__file__).parent / "samples"
    good, bad = samples / "good.parquet", samples / "bad" / "MSK002.parquet"
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder)
        (project / "test_gate.py").write_text(SUITE)
        check = [str(Path(sys.executable).parent / "lineage"), "check"]
        suite = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
        trial(project, [*check, str(good)], 0)
        trial(project, [*check, "-q", str(bad)], 1, HEADLINE)
        trial(project, [*suite, f"--lineage-trace={good}"], 0, "2 passed", f" checks on {good}: ")
        trial(project, [*suite, f"--lineage-trace={bad}"], 1, "1 failed, 1 passed", f"AssertionError: {HEADLINE}")
        trial(project, suite, 1, "1 passed, 1 error", "lineage_trace: no trace is given")


def trial(project: Path, command: list[str], code: int, *said: str) -> None:
    """Run a command in the project; it exits with ``code`` and says all of this, or the script ends."""
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    missing = [text for text in said if text not in done.stdout]
    if done.returncode != code or missing:
        print(done.stdout + done.stderr, file=sys.stderr)
        sys.exit(f"{' '.join(command)}: exit {done.returncode} (expected {code}), not said: {missing}")
    print(f"exit {code}, as it should be: {' '.join(command)}")


if __name__ == "__main__":
    main()
