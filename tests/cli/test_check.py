"""``lineage check`` as a gate: settings, baselines and thresholds from the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from lineage.cli import app
from lineage.schema import META_STATE

SAMPLES = Path(__file__).parents[2] / "traces" / "samples"
GOOD, BAD, OTHER = SAMPLES / "good.parquet", SAMPLES / "bad" / "MSK002.parquet", SAMPLES / "bad" / "LEN001.parquet"
SOME = ("--select", "KEY001,LEN001,MSK002")  # what is not about the codes needs few of them


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    """Run a command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, ["check", *map(str, arguments)])


def test_a_baseline_accepts_yesterdays_violation_and_fails_on_a_new_one(invoke):
    """Written by --update-baseline, which accepts what it finds; another fault still fails, and leads the report."""
    made = invoke(BAD, *SOME, "--baseline", "known.json", "--update-baseline")
    assert made.exit_code == 0
    assert re.fullmatch(r"baseline known\.json: \d+ violations accepted\n", made.stderr)
    again = invoke(BAD, *SOME, "--baseline", "known.json")
    assert again.exit_code == 0
    assert re.search(r"\d violations, all accepted", again.stdout)
    assert again.stdout.splitlines()[-1].count("2 pass, 1 accepted") == 1
    new = invoke(OTHER, *SOME, "--baseline", "known.json")
    assert new.exit_code == 1
    assert new.stdout.startswith("LEN001 ")


@pytest.mark.slow
def test_updating_a_baseline_keeps_what_was_not_judged(invoke):
    """--select narrows what an update may forget."""
    invoke(BAD, *SOME, "--baseline", "known.json", "--update-baseline")
    invoke(OTHER, "--select", "LEN001", "--baseline", "known.json", "--update-baseline")
    codes = {one["code"] for one in json.loads(Path("known.json").read_text())["violations"]}
    assert {"MSK002", "LEN001"} <= codes
    invoke(GOOD, *SOME, "--baseline", "known.json", "--update-baseline")
    assert json.loads(Path("known.json").read_text())["violations"] == []


def test_a_baseline_is_left_alone_when_a_trace_cannot_be_read(invoke):
    """An update from half of the traces would forget the other half."""
    invoke(BAD, *SOME, "--baseline", "known.json", "--update-baseline")
    before = Path("known.json").read_bytes()
    assert invoke(GOOD, "gone.parquet", *SOME, "--baseline", "known.json", "--update-baseline").exit_code == 2
    assert Path("known.json").read_bytes() == before


@pytest.mark.slow
def test_over_several_traces_a_known_violation_occurs_when_it_occurs_in_one(invoke):
    """The other trace does not have it, and nothing is to be forgotten."""
    made = invoke(BAD, OTHER, *SOME, "--baseline", "known.json", "--update-baseline")
    again = invoke(BAD, OTHER, *SOME, "--baseline", "known.json")
    assert (made.exit_code, again.exit_code) == (0, 0)
    assert "did not occur" not in made.stdout + again.stdout
    assert "known violations did not occur" in invoke(GOOD, OTHER, *SOME, "--baseline", "known.json").stdout


def test_outputs_of_the_settings_that_name_their_format_stay(invoke):
    """Another printed format does not take the copies away."""
    Path("lineage.toml").write_text('output = ["report.out", "json=copy.json"]')
    assert invoke(GOOD, *SOME, "--format", "github").exit_code == 0
    assert json.loads(Path("copy.json").read_text())["exit_code"] == 0
    assert not Path("report.out").exists()


def test_a_torn_trace_makes_a_baseline_forget_nothing(invoke):
    """What could not be seen may still be there."""
    invoke(BAD, *SOME, "--baseline", "known.json", "--update-baseline")
    table = pq.read_table(GOOD)
    state = json.dumps({"closed": False, "torn": [3]}).encode()
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, META_STATE: state}), "torn.parquet")
    done = invoke("torn.parquet", *SOME, "--baseline", "known.json", "--update-baseline")
    assert done.exit_code == 3
    assert {one["code"] for one in json.loads(Path("known.json").read_text())["violations"]} == {"MSK002"}


@pytest.mark.parametrize(
    ("setting", "option"), [("exit-zero = true", "--no-exit-zero"), ("baseline = 'known.json'", "--no-baseline")]
)
@pytest.mark.slow
def test_a_setting_can_be_taken_back(invoke, setting, option):
    """What the file switches on, the command line switches off."""
    invoke(BAD, *SOME, "--baseline", "known.json", "--update-baseline")
    Path("lineage.toml").write_text(setting)
    assert invoke(BAD, "--select", "MSK002").exit_code == 0
    assert invoke(BAD, "--select", "MSK002", option).exit_code == 1


def test_settings_of_the_project_hold_and_the_command_line_wins(invoke):
    """pyproject's [tool.lineage] is found; each option given replaces its setting, and only that."""
    Path("pyproject.toml").write_text(
        '[tool.lineage]\nselect = ["TOP", "MSK002", "LEN001"]\nexit-zero = true\n'
        'format = "json"\nmax-violations = {MSK002 = 50}\n'
    )
    said = json.loads(invoke(BAD).stdout)
    assert {one["code"] for one in said["verdicts"]} == {"TOP001", "TOP002", "TOP003", "MSK002", "LEN001"}
    assert (invoke(BAD).exit_code, said["headline"]) == (0, None)
    narrowed = json.loads(invoke(BAD, "--select", "MSK002", "--max-violations", "MSK002=0").stdout)
    assert [one["code"] for one in narrowed["verdicts"]] == ["MSK002"]
    assert narrowed["headline"]["code"] == "MSK002"
    assert invoke(BAD, "--format", "text").stdout.startswith("LEN001")


def test_another_settings_file_can_be_named(invoke):
    """--config stands in for the file that would be found."""
    Path("lineage.toml").write_text("select = 'KEY001'")
    Path("strict.toml").write_text("select = 'MSK001'\nmax-warnings = 0")
    assert "KEY001" in invoke(GOOD).stdout
    strict = invoke(GOOD, "--config", "strict.toml").stdout
    assert "KEY001" not in strict
    assert "MSK001" in strict


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--require", "PAD001=5"), 1, "fails: PAD001 is required to examine 5 facts and examined 4"),
        (("--require", "PAD001,KEY001=10"), 0, " pass"),
        (("--require", "PAD001=5", "--exit-zero"), 0, "fails: PAD001"),
    ],
)
def test_a_required_check_that_saw_too_little_exits_one_and_says_why(invoke, options, code, says):
    """A gate that must look at something says when it did not."""
    done = invoke(GOOD, "--select", "KEY001,PAD001", *options)
    assert done.exit_code == code
    assert says in done.stdout


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--update-baseline",), "--update-baseline: say which file"),
        (("--baseline", "none.json"), "none.json: no such baseline; make it with --update-baseline"),
        (("--config", "none.toml"), "none.toml: no such settings file"),
        (("--max-violations", "MSK002"), "--max-violations MSK002: say how many, as in MSK002=3"),
        (("--require", "MSK002=x"), "--require MSK002=x: expected a number"),
        (("--select", "NOPE9"), "no invariant 'NOPE9'"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_judged(invoke, options, says):
    """The library's error says what, where and how to mend it; the edge prints it as one line."""
    done = invoke(GOOD, *options)
    assert says in str(done.exception)
    assert done.stdout == ""
