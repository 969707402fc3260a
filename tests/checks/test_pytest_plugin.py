"""The pytest plugin, in suites of its own: silent until it is used, and never a pass for want of a trace."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pandas  # noqa: F401 - pytester forgets what an inner session imports, and C extensions load once a process
import pytest

import lineage.testing  # noqa: F401

pytest_plugins = ("pytester",)

SAMPLES = Path(__file__).parents[2] / "traces" / "samples"
GOOD, BAD = SAMPLES / "good.parquet", SAMPLES / "bad" / "MSK002.parquet"

SUITE = """
from lineage.testing import assert_invariants

def test_the_run_keeps_its_contracts(lineage_trace):
    assert_invariants(lineage_trace, select=["MSK001", "MSK002", "KEY001"])
"""


@pytest.mark.slow
def test_a_session_that_does_not_use_it_imports_nothing_heavy(tmp_path: Path) -> None:
    """pytest loads the plugin by its entry point, and with it no duckdb, pyarrow, numpy, pandas or torch."""
    (tmp_path / "test_theirs.py").write_text(
        "def test_theirs(pytestconfig):\n    pytestconfig.getoption('lineage_trace')\n"
    )
    program = (
        "import pytest, sys\n"
        "code = pytest.main(['-q', '-p', 'no:cacheprovider'])\n"
        "heavy = ('duckdb', 'pyarrow', 'numpy', 'pandas', 'torch', 'rich', 'typer')\n"
        "loaded = 'lineage.checks.pytest_plugin' in sys.modules\n"
        "print(int(code), loaded, [name for name in heavy if name in sys.modules])"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "0 True []", done.stdout + done.stderr


def test_a_good_trace_passes_and_is_named_at_the_end(pytester: pytest.Pytester) -> None:
    """The fixture is the trace of the option; the summary counts the verdicts on it."""
    pytester.makepyfile(test_it=SUITE)
    done = pytester.runpytest(f"--lineage-trace={GOOD}")
    done.assert_outcomes(passed=1)
    done.stdout.fnmatch_lines([f"lineage: 3 checks on {GOOD}: 3 pass"])


def test_a_bad_trace_fails_with_the_headline_at_the_line_of_the_test(pytester: pytest.Pytester) -> None:
    """What pytest shows is the test's own line and the headline, no line of this package; and it exits 1."""
    pytester.makepyfile(test_it=SUITE)
    done = pytester.runpytest(f"--lineage-trace={BAD}")
    done.assert_outcomes(failed=1)
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    done.stdout.fnmatch_lines(
        [
            ">*assert_invariants(lineage_trace, select=*",
            "E *AssertionError: MSK002 consumers use the rollout's mask: first broken at step 2, stage update_actor",
            "E *  expected  mask sum *",
            "E *  actual    mask sum *",
            "E *  * violations in all",
            f"E *  trace     {BAD}",
            "",
            "test_it.py:4: AssertionError",
            f"lineage: 3 checks on {BAD}: 2 pass, 1 fail",
        ]
    )
    assert "assertions.py" not in done.stdout.str()


def test_no_trace_given_is_an_error_that_says_how_to_give_one(pytester: pytest.Pytester) -> None:
    """Never a skip: a gate without its trace is broken."""
    pytester.makepyfile(test_it=SUITE)
    done = pytester.runpytest()
    done.assert_outcomes(errors=1)
    done.stdout.fnmatch_lines(["lineage_trace: no trace is given: pytest --lineage-trace=PATH, or *"])
    done.stdout.no_fnmatch_line("*Traceback*")
    done.stdout.no_fnmatch_line("lineage: *")


@pytest.mark.parametrize("name", ["nowhere.parquet", "notes.parquet", "nowhere://runs/one.parquet"])
def test_a_trace_that_cannot_be_read_is_an_error_in_one_line(name: str, pytester: pytest.Pytester) -> None:
    """A path that leads nowhere, a file that is no trace, a URL; as the option and as the setting."""
    (pytester.path / "notes.parquet").write_text("not a trace")
    pytester.makepyfile(test_it=SUITE)
    pytester.makeini(f"[pytest]\nlineage_trace = {name}\n")
    for done in (pytester.runpytest(f"--lineage-trace={name}"), pytester.runpytest()):
        done.assert_outcomes(errors=1)
        (said,) = [line for line in done.stdout.lines if line.startswith("lineage_trace: ")]
        assert name in said
        assert not [line for line in done.stdout.lines if line.startswith(("E ", ">"))]


def test_the_setting_is_seen_from_its_file_and_the_option_wins(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``lineage_trace`` in pytest's settings is a path from their folder, wherever pytest is started."""
    pytester.makeini("[pytest]\nlineage_trace = runs/trace.parquet\n")
    (pytester.mkdir("runs") / "trace.parquet").write_bytes(GOOD.read_bytes())
    below = pytester.mkdir("below")
    (below / "test_it.py").write_text(SUITE)
    monkeypatch.chdir(below)
    done = pytester.runpytest()
    done.assert_outcomes(passed=1)
    done.stdout.fnmatch_lines([f"lineage: 3 checks on {pytester.path}/runs/trace.parquet: 3 pass"])
    pytester.runpytest(f"--lineage-trace={BAD}").assert_outcomes(failed=1)


def test_two_tests_share_one_open_trace_and_one_line(pytester: pytest.Pytester) -> None:
    """The trace is opened once a session; the line at the end has each code once."""
    pytester.makepyfile(
        """
        from lineage.testing import assert_invariants

        seen = []

        def test_one(lineage_trace):
            seen.append(lineage_trace)
            assert_invariants(lineage_trace, select="KEY001")

        def test_other(lineage_trace):
            assert seen == [lineage_trace]
            assert_invariants(lineage_trace, select=["KEY001", "KEY002", "KEY003"])
            assert lineage_trace.sql("select count(*) from steps where global_steps > 0").fetchall() == [(2,)]
        """
    )
    done = pytester.runpytest(f"--lineage-trace={GOOD}")
    done.assert_outcomes(passed=2)
    lines = [line for line in done.stdout.lines if line.startswith("lineage: ")]
    assert lines == [f"lineage: 3 checks on {GOOD}: 3 pass"]


@pytest.mark.slow
def test_workers_of_xdist_hand_their_account_on(pytester: pytest.Pytester) -> None:
    """With two workers each test has its trace, and one line counts what both found."""
    pytester.makepyfile(
        """
        import pytest
        from lineage.testing import assert_invariants

        @pytest.mark.parametrize("code", ["KEY001", "KEY002", "MSK001", "MSK002"])
        def test_one(lineage_trace, code, worker_id):
            assert worker_id in ("gw0", "gw1")
            assert_invariants(lineage_trace, select=code)
        """
    )
    done = pytester.runpytest_subprocess("-n", "2", f"--lineage-trace={BAD}")
    done.assert_outcomes(passed=3, failed=1)
    lines = [line for line in done.stdout.lines if line.startswith("lineage: ")]
    assert lines == [f"lineage: 4 checks on {BAD}: 3 pass, 1 fail"]


def test_help_names_the_option_and_the_fixture(pytester: pytest.Pytester) -> None:
    """``pytest --help`` and ``pytest --fixtures`` say what there is."""
    assert re.search(r"--lineage-trace=PATH\s+the trace that the fixture", pytester.runpytest("--help").stdout.str())
    pytester.runpytest("--fixtures").stdout.fnmatch_lines(
        ["lineage_trace [[]session scope[]]*", "*The trace named by*"]
    )


def test_without_the_plugin_there_is_no_fixture(pytester: pytest.Pytester) -> None:
    """``-p no:lineage`` switches it off."""
    pytester.makepyfile(test_it=SUITE)
    done = pytester.runpytest("-p", "no:lineage")
    done.assert_outcomes(errors=1)
    done.stdout.fnmatch_lines(["*fixture 'lineage_trace' not found"])
