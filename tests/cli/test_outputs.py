"""Where the formats of a report go: pairs of format and file, files that cannot be written, the step summary."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lineage.checks.report import Refused
from lineage.cli.outputs import Output, outputs, write
from lineage.errors import UserError

SAMPLES = Path(__file__).parents[2] / "traces" / "samples"
REFUSED = [Refused("missing.parquet", "missing.parquet: no such file or folder")]


@pytest.mark.parametrize(
    ("formats", "files", "wanted"),
    [
        ([], [], [("text", None)]),
        (["json"], [], [("json", None)]),
        (["json", "json"], [], [("json", None)]),
        # FORMAT=FILE is a copy beside what is printed
        ([], ["sarif=x"], [("sarif", "x"), ("text", None)]),
        (["text"], ["sarif=x.sarif", "junit=j.xml"], [("sarif", "x.sarif"), ("junit", "j.xml"), ("text", None)]),
        (["github", "sarif"], ["sarif=x"], [("sarif", "x"), ("github", None)]),
        (["sarif"], ["sarif=x"], [("sarif", "x")]),
        # FILE takes the place of printing
        (["sarif"], ["x"], [("sarif", "x")]),
        (["text", "sarif"], ["a.txt", "b.sarif"], [("text", "a.txt"), ("sarif", "b.sarif")]),
        (["text", "sarif"], ["sarif=x", "a.txt"], [("sarif", "x"), ("text", "a.txt")]),
        # without a format, a file's name says it
        ([], ["x.sarif"], [("sarif", "x.sarif")]),
        ([], ["x.sarif.json"], [("sarif", "x.sarif.json")]),
        ([], ["x.JSON", "j.xml", "report"], [("json", "x.JSON"), ("junit", "j.xml"), ("text", "report")]),
        (["sarif"], ["x.json"], [("sarif", "x.json")]),
        # a file with an equals sign, and printing by name
        ([], ["./a=b.txt"], [("text", "a=b.txt")]),
        ([], ["text=a=b"], [("text", "a=b")]),
        ([], ["sarif=-"], [("sarif", None)]),
        (["json"], ["-", "text=log.txt"], [("text", "log.txt"), ("json", None)]),
    ],
)
def test_formats_and_files_are_paired(formats, files, wanted):
    """Every way to say it, and what it comes to."""
    made = outputs(formats, files, quiet=True)
    assert made == [Output(form, None if file is None else Path(file), True) for form, file in wanted]


@pytest.mark.parametrize(
    ("formats", "files", "said"),
    [
        (["xml"], [], "--format xml: no such format; known: text, json, junit, sarif, github"),
        ([], ["sariff=x"], "--output sariff=x: no such format; known: "),
        ([], ["sarif="], "--output sarif=: name a file"),
        ([], [""], "--output : name a file"),
        (["text", "sarif"], ["x.sarif"], "say which is which, as in --output sarif=x.sarif"),
        (["sarif"], ["a", "b"], "say which is which"),
        (["text"], ["x.sarif"], "say --output sarif=x.sarif, or text=x.sarif if that is meant"),
        (["text", "json"], [], "text and json would be printed into each other"),
        ([], ["sarif=-", "json=-"], "sarif and json would be printed into each other"),
        ([], ["sarif=x", "json=./x"], "--output x: sarif and json would be written into one file"),
    ],
)
def test_what_cannot_be_meant_is_refused(formats, files, said):
    """In one line that shows how to say it."""
    with pytest.raises(UserError) as caught:
        outputs(formats, files)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_written_keeps_no_other_from_it(tmp_path, capsys):
    """The other files are written and the text is printed; then one line names all that failed."""
    (tmp_path / "taken").write_text("a file, no folder")
    where = outputs(["json"], [f"sarif={tmp_path}", f"junit={tmp_path}/taken/x.xml", f"text={tmp_path}/new/x.txt"])
    with pytest.raises(UserError) as caught:
        write(REFUSED, where)
    said = str(caught.value)
    assert said.startswith(f"--output: cannot write {tmp_path}: ")
    assert "taken" in said
    assert "\n" not in said
    assert (tmp_path / "new" / "x.txt").read_text("utf-8") == "error: missing.parquet: no such file or folder\n"
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2


def test_a_refused_trace_is_printed_once(capsys):
    """As text its error line has been printed already; as JSON it is part of the answer."""
    write(REFUSED, outputs([], []))
    assert capsys.readouterr().out == ""
    write(REFUSED, outputs(["github"], []))
    assert capsys.readouterr().out.startswith("::error file=missing.parquet,line=1,")


def test_the_step_summary_is_appended_where_there_is_one(tmp_path, monkeypatch, capsys):
    """GITHUB_STEP_SUMMARY names a file that other commands of the step write to; only the github format writes it."""
    summary = tmp_path / "summary.md"
    summary.write_text("# before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    write(REFUSED, outputs(["json"], []))
    assert summary.read_text() == "# before\n"
    write(REFUSED, outputs([], [f"github={tmp_path}/log"]))
    assert summary.read_text().startswith("# before\n## lineage check: unusable\n")


def test_a_step_summary_that_cannot_be_written_is_named(tmp_path, monkeypatch, capsys):
    """The annotations are printed all the same."""
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path))
    with pytest.raises(UserError, match=f"cannot write {tmp_path}: "):
        write(REFUSED, outputs(["github"], []))
    assert capsys.readouterr().out.startswith("::error ")


@pytest.mark.parametrize("variable", [None, ""])
def test_without_a_step_summary_nothing_is_said_of_it(variable, monkeypatch, capsys):
    """Unset or empty, the annotations are all there is."""
    if variable is None:
        monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    else:
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", variable)
    write(REFUSED, outputs(["github"], []))
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_full_step_summary_is_left_within_its_limit(tmp_path, monkeypatch, capsys):
    """What is in it already counts; a summary above 1 MiB would be refused as a whole."""
    summary = tmp_path / "summary.md"
    summary.write_bytes(b"x" * (1024 * 1024 - 60))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    write(REFUSED, outputs(["github"], []))
    assert 1024 * 1024 - 60 < summary.stat().st_size <= 1024 * 1024


def _lineage(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    program = "import sys; from lineage.cli import main; main()"
    env = {name: value for name, value in os.environ.items() if name != "GITHUB_STEP_SUMMARY"} | environment
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=cwd, capture_output=True, env=env, check=False
    )


def test_a_report_does_not_take_the_place_of_a_trace(tmp_path):
    """A file named twice by mistake is not lost."""
    trace = tmp_path / "trace.parquet"
    trace.write_bytes(b"PAR1 and more")
    with pytest.raises(UserError, match="a report would take its place"):
        outputs([], [str(trace)])
    assert trace.read_bytes() == b"PAR1 and more"


@pytest.mark.slow
def test_the_command_writes_every_format_at_once(tmp_path):
    """Text on the terminal, a file for each of the others, the step's summary; exit 1 by the bad trace."""
    bad = SAMPLES / "bad" / "MSK002.parquet"
    summary = tmp_path / "summary.md"
    files = ("sarif=out/x.sarif", "junit=out/j.xml", "json=out/r.json", "github=out/log")
    options = [part for file in files for part in ("--output", file)]
    done = _lineage("check", str(bad), "--format", "text", *options, cwd=tmp_path, GITHUB_STEP_SUMMARY=str(summary))
    assert done.returncode == 1
    assert done.stdout.startswith(b"MSK002 consumers use the rollout's mask: first broken")
    assert sorted(one.name for one in (tmp_path / "out").iterdir()) == ["j.xml", "log", "r.json", "x.sarif"]
    (run,) = json.loads((tmp_path / "out" / "x.sarif").read_text("utf-8"))["runs"]
    said = json.loads((tmp_path / "out" / "r.json").read_text("utf-8"))["verdicts"]
    rules = list(dict.fromkeys(one["ruleId"] for one in run["results"]))
    assert rules[0] == "MSK002"
    assert set(rules) == {one["code"] for one in said if one["violations"] or one["warnings"]}
    assert "| MSK002 |" in summary.read_text("utf-8")


@pytest.mark.slow
def test_a_terminal_of_another_encoding_gets_escapes(tmp_path):
    """A path that the encoding cannot hold does not end the command."""
    bad = tmp_path / "ключ.parquet"
    bad.write_bytes((SAMPLES / "good.parquet").read_bytes())
    done = _lineage("check", bad.name, "-q", "--select", "KEY001", cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(rb"\u043a\u043b\u044e\u0447.parquet: 1 pass")
