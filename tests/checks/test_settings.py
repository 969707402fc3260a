"""Settings files, thresholds and the exit code they lead to."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from faults import FAULTS

from lineage.checks import ExitCode, Gate, Kind, Settings, Verdict
from lineage.checks.catalogue import CatalogueError
from lineage.checks.policy import Match, Policy
from lineage.checks.settings import SETTINGS, SettingsError, counts, find, load


def test_every_setting_is_read_and_paths_are_seen_from_the_file(tmp_path):
    """``[tool.lineage]`` says all that the command line can."""
    file = tmp_path / "pyproject.toml"
    file.write_text(
        "[tool.lineage]\n"
        'select = ["KEY", "LEN001"]\nignore = "KEY003"\nrequire = ["KEY001", "LEN001=50"]\nmax-warnings = 0\n'
        'allow-incomplete = true\nexit-zero = true\nbaseline = "known.json"\nbaseline-match = "site"\nchecks = "own"\n'
        'format = ["text", "sarif"]\noutput = "sarif=out/x.sarif"\n'
        "[tool.lineage.max-violations]\nKEY002 = 3\n"
    )
    assert load(file) == Settings(
        select=("KEY", "LEN001"),
        ignore=("KEY003",),
        policy=Policy({"KEY001": 1, "LEN001": 50}, {"KEY002": 3}, 0, True, True),
        baseline=tmp_path / "known.json",
        baseline_match=Match.SITE,
        checks=(tmp_path / "own",),
        format=("text", "sarif"),
        output=(f"sarif={tmp_path / 'out/x.sarif'}",),
        source=file,
    )


@pytest.mark.parametrize(
    ("said", "read"),
    [("-", "-"), ("json=-", "json=-"), ("x=1.json", "x={here}/1.json"), ("a b=c.json", "{here}/a b=c.json")],
)
def test_outputs_are_split_as_on_the_command_line(tmp_path, said, read):
    """``-`` stays what is printed; only a word before ``=`` is a format."""
    file = tmp_path / "lineage.toml"
    file.write_text(f"output = ['{said}']")
    assert load(file).output == (read.format(here=tmp_path),)


def test_the_nearest_file_that_speaks_of_lineage_holds(tmp_path):
    """Upwards from the folder; a pyproject of somebody else's is passed by, and lineage.toml comes first."""
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text("[tool.lineage]\n")
    (tmp_path / "a" / "pyproject.toml").write_text("[tool.ruff]\n")
    assert find(inner) == tmp_path / "pyproject.toml"
    (tmp_path / "lineage.toml").write_text("")
    assert find(inner) == tmp_path / "lineage.toml"
    (inner / "lineage.toml").write_text("")
    assert find(inner) == inner / "lineage.toml"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("selct = []", "no setting 'selct'; did you mean select?"),
        ("select = 3", "select = 3: expected a string or a list of strings"),
        ("max-violations = ['KEY001']", "KEY001: say how many, as in KEY001=3"),
        ("max-warnings = -1", "expected a number of 0 or more"),
        ("max-warnings = true", "expected a number of 0 or more"),
        ("exit-zero = 'yes'", "expected true or false"),
        ("baseline-match = 'fuzzy'", "expected one of key, site"),
        ("baseline = 3", "expected a path"),
        ("= =", "not TOML"),
    ],
)
def test_a_mistake_in_a_settings_file_names_file_and_setting(tmp_path, text, says):
    """One line that says what, where and how to mend it."""
    file = tmp_path / "lineage.toml"
    file.write_text(text)
    with pytest.raises(SettingsError) as raised:
        load(file)
    assert str(raised.value).startswith(f"{file}: ")
    assert says in str(raised.value)


def test_a_gate_that_has_nothing_left_to_judge_by_is_refused():
    """It would pass whatever the trace holds."""
    with pytest.raises(CatalogueError, match="no invariant is left"):
        Gate.of(Settings(select=("KEY",), ignore=("KEY",)))


def test_a_header_in_a_file_of_our_own_is_named(tmp_path):
    """lineage.toml holds the keys at its top."""
    file = tmp_path / "lineage.toml"
    file.write_text("[tool.lineage]\nselect = 'KEY'")
    with pytest.raises(SettingsError, match="no setting 'tool'; no header is wanted here"):
        load(file)


def test_counts_come_as_tables_lists_and_words():
    """What TOML and the command line write for one thing."""
    assert counts({"key001": 5}) == counts(["KEY001=5"]) == counts("KEY001=5") == {"KEY001": 5}
    assert counts("KEY001,LEN001=2", default=1) == {"KEY001": 1, "LEN001": 2}


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (Policy(require={"NOPE1": 1}), "no invariant 'NOPE1'"),
        (Policy(require={"KEY": 1}), "that is a family"),
        (Policy(require={"LEN001": 1}), "require LEN001: left out by select or ignore"),
        (Policy(max_violations={"KEY": 1}), "max-violations KEY: that is a family"),
    ],
)
def test_a_gate_that_cannot_be_meant_is_refused(policy, says):
    """A required check that is not run would never be missed."""
    with pytest.raises(CatalogueError, match=says):
        Gate.of(Settings(select=("KEY",), policy=policy))


@pytest.mark.parametrize(
    ("policy", "code"),
    [
        (Policy(), ExitCode.VIOLATIONS),
        (Policy(max_violations={"TOK001": 1}), ExitCode.PASS),
        (Policy(max_violations={"TOK001": 0}), ExitCode.VIOLATIONS),
        (Policy(exit_zero=True), ExitCode.PASS),
        (Policy(require={"TOK001": 10_000}, max_violations={"TOK001": 1}), ExitCode.VIOLATIONS),
    ],
)
def test_a_threshold_lets_so_many_violations_through(policy, code, rows, write):
    """One violation under a threshold of one; the verdict itself stays what it is."""
    FAULTS["TOK001"][0](rows)
    (report,) = Gate.of(Settings(select=("TOK001",), policy=policy)).judge_all([write(rows)])
    assert report.exit_code == code
    assert report.verdict("TOK001").kind == "fail"
    assert report.verdict("TOK001").errors == 1


@pytest.mark.parametrize(("most", "code"), [(None, ExitCode.PASS), (3, ExitCode.PASS), (2, ExitCode.VIOLATIONS)])
def test_warnings_count_once_there_is_a_limit(most, code):
    """Without a limit warnings change nothing; with one, more of them exit 1 and the report says why."""
    verdicts = [Verdict("KEY001", Kind.PASS, 9, warnings=2), Verdict("MSK002", Kind.PASS, 9, warnings=1)]
    policy = Policy(max_warnings=most)
    assert policy.exit_code(verdicts) == code
    assert list(policy.complaints(verdicts)) == (["3 warnings, at most 2 let through"] if most == 2 else [])


def test_a_report_reads_well_in_a_notebook_and_as_a_table(rows, write):
    """HTML with the headline escaped, a data frame of verdicts, a relation of violations."""
    FAULTS["TOK001"][0](rows)
    (report,) = Gate.of(Settings(select=("TOK001", "KEY001"))).judge_all([write(rows)])
    shown = report._repr_html_()
    assert shown.startswith("<pre>TOK001 input_ids are prompts ++ responses")
    assert "<table" in shown
    assert list(report.df().query("verdict == 'fail'")["code"]) == ["TOK001"]
    assert report.violations.project("code, stage, severity").fetchall() == [("TOK001", "rollout", "error")]
    assert str(report).startswith("TOK001")


def test_a_trace_that_cannot_be_read_does_not_stop_the_others(rows, write):
    """Each trace has its outcome, in the order given."""
    refused, report = Gate.of(Settings(select=("KEY001",))).judge_all([Path("nowhere.parquet"), write(rows)])
    assert (refused.exit_code, report.exit_code) == (ExitCode.UNUSABLE, ExitCode.PASS)
    assert "no such file" in refused.message


def test_the_page_shows_every_setting_as_it_is_read(tmp_path):
    """The example of docs/gate.md is a settings file that says all there is to say."""
    page = (Path(__file__).parents[2] / "docs" / "gate.md").read_text("utf-8")
    example = page.split("```toml\n")[1].split("```")[0]
    file = tmp_path / "pyproject.toml"
    file.write_text(example)
    assert set(tomllib.loads(example)["tool"]["lineage"]) == set(SETTINGS)
    assert load(file).policy.require == {"MSK002": 1, "KEY001": 100}
