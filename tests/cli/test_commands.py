"""The command line from outside: output, exit codes, one line for a mistake."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from lineage import compact as compaction
from lineage import errors
from lineage.checks.catalogue import catalogue, get
from lineage.checks.policy import worst
from lineage.checks.sources import SOURCES, named
from lineage.checks.verdict import ExitCode
from lineage.cli import commands
from lineage.cli.compact import compact_command
from lineage.cli.places import LATEST_RUN
from lineage.run import LATEST

ROOT = Path(__file__).parents[2]


def test_a_clean_trace_exits_zero_with_a_line_a_code(command, trace_file):
    """Every code with its verdict and examined count, then a summary; plain text in a pipe."""
    done = command("check", trace_file)
    assert (done.code, done.err) == (0, "")
    *verdicts, last = done.out.splitlines()
    said = [line.split()[0] for line in verdicts if line]
    assert said[: len(catalogue())] == [one.code for one in catalogue()]
    assert re.search(r": \d+ pass, ", last)
    assert "fail" not in last
    assert "\x1b[" not in done.out


def test_unusable_input_beats_everything(command, trace_file, tmp_path):
    """One good and one missing trace: the good one is judged, the missing one is one line, and the exit code is 2."""
    done = command("check", trace_file, tmp_path / "missing.parquet", "--exit-zero", "--select", "KEY001")
    assert done.code == 2
    assert done.err.splitlines() == [f"error: {tmp_path / 'missing.parquet'}: no such file or folder"]
    assert " pass" in done.out.splitlines()[-1]


def test_json_is_one_object_for_one_trace(command, trace_file):
    """``--json`` prints nothing but JSON."""
    said = json.loads(command("check", trace_file, "--json", "--select", "KEY").out)
    assert [one["code"] for one in said["verdicts"]] == [one.code for one in catalogue() if one.family == "KEY"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("check", "--select", "KEY9"), "no invariant 'KEY9'"),
        (("check",), "runs/latest: no such file or folder; no run yet? try: lineage run"),
        (("explain", "TOK01"), "did you mean TOK001?"),
        (("compact", "nowhere"), "nowhere: no such folder"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_two(command, arguments, says, tmp_path):
    """No traceback for a user's mistake."""
    done = command(*arguments, cwd=tmp_path)
    assert done.code == 2
    (line,) = done.err.splitlines()
    assert line.startswith("error: ")
    assert says in line


def test_sql_prints_table_csv_and_json(command, trace_file):
    """The same answer in three forms."""
    query = "select stage, count(*) as n from rows where stage in ('clear', 'dump') group by all"
    assert command("sql", trace_file, query).out.splitlines() == ["stage  n", "clear  2"]
    assert command("sql", trace_file, query, "--format", "csv").out == "stage,n\nclear,2\n"
    assert json.loads(command("sql", trace_file, query, "--format", "json").out) == [{"stage": "clear", "n": 2}]


def test_sql_as_json_is_valid_json(command, trace_file):
    """--json is --format json; numbers JSON has no word for are null, a decimal is a number, keys are text."""
    query = "select 1.5 as x, 'nan'::double as y, map {1: 'a'} as m, date '2026-01-02' as d"
    done = command("sql", trace_file, query, "--json")
    assert json.loads(done.out) == [{"x": 1.5, "y": None, "m": {"1": "a"}, "d": "2026-01-02"}]
    twice = command("sql", trace_file, "select 1 as a, 2 as a", "--json")
    assert (twice.code, twice.out) == (2, "")
    assert "two columns are named 'a'" in twice.err


def test_info_show_and_explain_as_json_hold_what_they_print(command, trace_file):
    """JSON and nothing else on stdout, with the facts of the text."""
    info = json.loads(command("info", trace_file, "--json").out)
    assert (info["complete"], info["first_step"], info["last_step"]) == (True, 1, 2)
    assert (info["pages"]["summed"], info["pages"]["unsummed"] > 0) == (0, True)
    assert info["facts"] == sum(stage["facts"] for stage in info["stages"])
    key = json.loads(command("sql", trace_file, "select key from trajectories limit 1", "--json").out)[0]["key"]
    shown = json.loads(command("show", trace_file, key, "--json").out)
    assert shown["keys"] == [key]
    marks = {event["fingerprint"] for event in shown["events"]} - {None}
    assert marks
    assert all(len(bytes.fromhex(mark)) == 8 for mark in marks)
    explained = json.loads(command("explain", "MSK002", "--json").out)
    assert explained["sources"] == {"S4": SOURCES["S4"]}


def test_explain_prints_the_sentence_of_its_source(command):
    """An installed wheel has no docs, so the source is spelt out; every S of the catalogue has a sentence."""
    assert f"S4: {SOURCES['S4']}" in command("explain", "MSK001").out
    for one in catalogue():
        assert set(re.findall(r"\bS\d+\b", one.source)) == set(named(one.source)), one.code


def test_explain_knows_the_codes_of_the_project(command, tmp_path, monkeypatch):
    """An invariant of one's own is found by --checks and by the settings file, and the file is named."""
    file = tmp_path / "rules" / "ACME001.sql"
    file.parent.mkdir()
    built_in = get("KEY001")
    file.write_text(built_in.sql.replace("KEY001", "ACME001"), "utf-8")
    said = json.loads(command("explain", "acme001", "--checks", file.parent, "--json").out)
    assert (said["code"], said["says"], Path(said["origin"])) == ("ACME001", built_in.says, file)
    monkeypatch.chdir(tmp_path)
    assert command("explain", "ACME001").code == 2
    (tmp_path / "lineage.toml").write_text('checks = ["rules"]\n')
    assert f"Written in:        {file}" in command("explain", "ACME001").out


def test_a_code_that_is_near_none_gets_no_silly_suggestion(command):
    """The families are listed instead, and not every code."""
    (line,) = command("explain", "NOPE1").err.splitlines()
    assert "did you mean" not in line
    assert line.startswith("error: no invariant 'NOPE1'; families of codes: ADV, ")
    assert "001" not in line


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("late_writer", "late_writer is a fault, not a code: QUE001 shows it (lineage explain QUE001); to see it: "),
        ("Late-Writer", "lineage selftest --fault late_writer"),
        ("late_writr", "no invariant 'late_writr'; of faults there is late_writer"),
    ],
)
def test_a_fault_is_told_from_a_code(command, asked, says):
    """``explain`` of a fault's name says whose it is and how to see it."""
    done = command("explain", asked)
    assert (done.code, done.out) == (2, "")
    (line,) = done.err.splitlines()
    assert says in line


def test_explain_says_of_a_warning_how_a_check_ends(command):
    """A code that only warns keeps no gate."""
    assert command("explain", "QUE006").out.splitlines()[0].endswith("exits 0 on it unless --max-warnings 0)")
    assert command("explain", "KEY001").out.splitlines()[0].endswith("(error)")


def test_compact_as_json_names_what_it_wrote(command, tmp_path):
    """The file of the parts of a run, as JSON."""
    import lineage as package

    with package.record(tmp_path / "run", run_id="r") as recorder:
        recorder.step(1)
        with recorder.stage("rollout", producer="p") as stage:
            stage.produce({"responses": [[1, 2]]}, keys=["q_0_0"])
        recorder.seal()
    done = command("compact", tmp_path / "run", "--json")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)["written"] == [str(tmp_path / "run" / "trace.parquet")]


def test_the_latest_run_is_where_runs_are_written():
    """The command line and the recorder mean the same folder."""
    assert LATEST_RUN.name == LATEST


def test_sql_cannot_leave_the_trace(command, trace_file):
    """Another file is refused in one line."""
    done = command("sql", trace_file, "select * from read_text('/etc/passwd')")
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("error: sql: Permission Error")


def test_show_prints_a_group_from_uid_to_weight_sync(command, trace_file):
    """A uid shows its trajectories, their lengths and masks, and where the weights went."""
    uid = command("sql", trace_file, "select uid from groups where not is_padding limit 1", "--format", "csv")
    done = command("show", trace_file, uid.out.split()[1])
    assert done.code == 0
    assert "mask_sum" in done.out
    assert "weight_sync" in done.out.splitlines()[-1]
    assert command("show", trace_file, "nobody").code == 2


def test_info_and_explain_say_what_there_is(command, trace_file):
    """info names the run and its stages; explain gives the sentence of a code."""
    info = command("info", trace_file).out
    assert "synthetic" in info
    assert "update_actor" in info
    assert "policy_len <= response_len" in command("explain", "msk001").out


def test_checking_never_imports_torch(trace_file):
    """A CI gate installs without torch: the check, sql and info commands do not import it."""
    code = (
        "import sys; from lineage.cli import app\n"
        f"try: app(['check', {str(trace_file)!r}, '--select', 'KEY'])\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'ray', 'vllm', 'transformers') if name in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_an_interrupt_exits_130(trace_file):
    """Ctrl-C is neither a pass nor a violation."""
    code = (
        "import lineage.checks.gate as gate\n"
        "def interrupted(*_, **__): raise KeyboardInterrupt\n"
        "gate.judge = interrupted\n"
        "import sys; sys.argv = ['lineage', 'check', sys.argv[1]]\n"
        "from lineage.cli import main; main()"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(trace_file)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 130
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("Query interrupted")])
def test_an_interrupted_statement_exits_130(error, monkeypatch, capsys):
    """DuckDB turns a Ctrl-C inside a statement into an error of its own."""

    def interrupted(**_: object) -> None:
        raise error

    monkeypatch.setattr(commands, "app", interrupted)
    with pytest.raises(SystemExit) as ended:
        commands.main()
    assert (ended.value.code, capsys.readouterr().err) == (130, "")


@pytest.mark.parametrize("name", ["UserError", "RecorderError", "UsageError"])
def test_every_error_of_ours_is_one_line(name, monkeypatch, capsys):
    """The edge knows the base class: an error of the recorder is no traceback either."""

    def broken(**_: object) -> None:
        raise getattr(errors, name)("nothing can be written")

    monkeypatch.setattr(commands, "app", broken)
    with pytest.raises(SystemExit) as ended:
        commands.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: nothing can be written\n"


@pytest.mark.parametrize("error", [pa.ArrowInvalid("not a part\nat byte 7"), OSError("disk full")])
def test_parts_that_cannot_be_compacted_are_one_line(error, tmp_path, monkeypatch):
    """A broken part or a full disk ends compact in one line."""

    def broken(folder: Path) -> Path:
        raise error

    monkeypatch.setattr(compaction, "compact", broken)
    with pytest.raises(errors.UserError, match=r"cannot compact: (not a part|disk full); the parts stay$"):
        compact_command(tmp_path)


def test_the_exit_code_is_the_worst_of_several_traces():
    """2 beats 1 beats 3 beats 0."""
    assert [worst(list(map(ExitCode, codes))) for codes in ([0, 3], [3, 1], [1, 2, 3], [])] == [3, 1, 2, 0]
