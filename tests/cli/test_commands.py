"""The command line from outside: output, exit codes, one line for a mistake."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from lineage import errors
from lineage.checks.policy import worst
from lineage.checks.verdict import ExitCode

app_module = importlib.import_module("lineage.cli.app")  # the package has a function of that name
compact_module = importlib.import_module("lineage.cli.compact")

ROOT = Path(__file__).parents[2]
_MAIN = "from lineage.cli import main; main()"


def lineage(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", _MAIN, *map(str, arguments)],
        capture_output=True, text=True, env=environment, cwd=cwd or ROOT, check=False,
    )  # fmt: skip


def test_a_clean_trace_exits_zero_with_a_line_a_code(trace_file):
    """Every code with its verdict and examined count, then a summary; plain text in a pipe."""
    done = lineage("check", trace_file)
    assert (done.returncode, done.stderr) == (0, "")
    assert "18 pass" in done.stdout.splitlines()[-1]
    assert "\x1b[" not in done.stdout


def test_unusable_input_beats_everything(trace_file, tmp_path):
    """One good and one missing trace: the good one is judged, the missing one is one line, and the exit code is 2."""
    done = lineage("check", trace_file, tmp_path / "missing.parquet", "--exit-zero")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"error: {tmp_path / 'missing.parquet'}: no such file or folder"]
    assert "18 pass" in done.stdout


def test_json_is_one_object_for_one_trace(trace_file):
    """``--json`` prints nothing but JSON."""
    said = json.loads(lineage("check", trace_file, "--json", "--select", "KEY").stdout)
    assert [one["code"] for one in said["verdicts"]] == ["KEY001", "KEY002", "KEY003"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("check", "--select", "KEY9"), "no invariant 'KEY9'"),
        (("check",), "runs/latest: no such file or folder; no run yet? try: lineage run"),
        (("explain", "TOK01"), "did you mean TOK001?"),
        (("compact", "nowhere"), "nowhere: no such folder"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_two(arguments, says, tmp_path):
    """No traceback for a user's mistake."""
    done = lineage(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert says in line


def test_usage_errors_exit_two():
    """An unknown option is typer's own error, with the same exit code."""
    assert lineage("check", "--nonsense").returncode == 2


def test_sql_prints_table_csv_and_json(trace_file):
    """The same answer in three forms."""
    query = "select stage, count(*) as n from rows where stage in ('clear', 'dump') group by all"
    assert lineage("sql", trace_file, query).stdout.splitlines() == ["stage  n", "clear  2"]
    assert lineage("sql", trace_file, query, "--format", "csv").stdout == "stage,n\nclear,2\n"
    assert json.loads(lineage("sql", trace_file, query, "--format", "json").stdout) == [{"stage": "clear", "n": 2}]


def test_sql_cannot_leave_the_trace(trace_file):
    """Another file is refused in one line."""
    done = lineage("sql", trace_file, "select * from read_text('/etc/passwd')")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: sql: Permission Error")


def test_show_prints_a_group_from_uid_to_weight_sync(trace_file):
    """A uid shows its trajectories, their lengths and masks, and where the weights went."""
    uid = lineage("sql", trace_file, "select uid from groups where not is_padding limit 1", "--format", "csv")
    done = lineage("show", trace_file, uid.stdout.split()[1])
    assert done.returncode == 0
    assert "mask_sum" in done.stdout
    assert "weight_sync" in done.stdout.splitlines()[-1]
    assert lineage("show", trace_file, "nobody").returncode == 2


def test_info_and_explain_say_what_there_is(trace_file):
    """info names the run and its stages; explain gives the sentence of a code."""
    info = lineage("info", trace_file).stdout
    assert "synthetic" in info
    assert "update_actor" in info
    assert "policy_len <= response_len" in lineage("explain", "msk001").stdout


def test_checking_never_imports_torch(trace_file):
    """A CI gate installs without torch: the check, sql and info commands do not import it."""
    code = (
        "import sys; from lineage.cli import app\n"
        f"try: app(['check', {str(trace_file)!r}])\nexcept SystemExit: pass\n"
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


@pytest.mark.parametrize("name", ["UserError", "RecorderError", "UsageError"])
def test_every_error_of_ours_is_one_line(name, monkeypatch, capsys):
    """The edge knows the base class: an error of the recorder is no traceback either."""

    def broken() -> None:
        raise getattr(errors, name)("nothing can be written")

    monkeypatch.setattr(app_module, "app", broken)
    with pytest.raises(SystemExit) as ended:
        app_module.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: nothing can be written\n"


@pytest.mark.parametrize("error", [pa.ArrowInvalid("not a part\nat byte 7"), OSError("disk full")])
def test_parts_that_cannot_be_compacted_are_one_line(error, tmp_path, monkeypatch):
    """A broken part or a full disk ends compact in one line."""

    def broken(folder: Path) -> Path:
        raise error

    monkeypatch.setattr(compact_module, "compact", broken)
    with pytest.raises(errors.UserError, match=r"cannot compact: (not a part|disk full); the parts stay$"):
        compact_module.compact_command(tmp_path)


def test_the_exit_code_is_the_worst_of_several_traces():
    """2 beats 1 beats 3 beats 0."""
    assert [worst(list(map(ExitCode, codes))) for codes in ([0, 3], [3, 1], [1, 2, 3], [])] == [3, 1, 2, 0]
