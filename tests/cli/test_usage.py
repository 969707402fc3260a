"""How the command line is used wrongly, helps, completes, and ends when nobody reads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from lineage.checks.catalogue import catalogue
from lineage.cli import app
from lineage.cli.exit_codes import JUDGES

ROOT = Path(__file__).parents[2]
GOOD = ROOT / "traces" / "samples" / "good.parquet"
COMMANDS = sorted(typer.main.get_command(app).commands)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("check", "--nonsense"), "--nonsense"),
        (("sql", GOOD), "missing argument 'QUERY' (try: lineage sql --help)"),
        (("sql", GOOD, "select 1", "--format", "xml"), "'xml' is not one of 'table', 'csv', 'json'"),
        (("explain", "KEY001", "KEY002"), "unexpected extra argument"),
        (("chekc",), "no such command 'chekc'. Did you mean 'check'? (try: lineage --help)"),
        (("--nonsense",), "(try: lineage --help)"),
    ],
)
def test_a_wrong_use_is_one_line_and_exit_code_two(command, arguments, says):
    """An unknown option or command, a missing argument, a bad value: what is wrong and where to look."""
    done = command(*arguments)
    assert (done.code, done.out) == (2, "")
    (line,) = done.err.splitlines()
    assert line.startswith("error: ")
    assert says in line
    assert line.endswith("--help)")


def test_without_a_command_there_is_help_and_exit_code_two(command):
    """``lineage`` alone did nothing, so it is no success; it says what there is."""
    done = command()
    assert (done.code, done.err) == (2, "")
    assert all(f"\n  {name} " in done.out for name in COMMANDS)


@pytest.mark.parametrize("name", [None, *COMMANDS])
def test_help_shows_the_exit_codes(command, name):
    """Every help page ends with the table of the codes that command can exit with."""
    done = command(*filter(None, [name, "--help"]))
    assert (done.code, done.err) == (0, "")
    *_, table = done.out.partition("Exit codes:\n")
    listed = [int(line.split()[0]) for line in table.splitlines()]
    assert {0, 2, 130} <= set(listed) <= set(map(int, JUDGES))
    if name in ("check", "run", None):
        assert listed == sorted(map(int, JUDGES))


def test_help_is_plain_in_a_pipe(process):
    """No box, no colour, whatever the terminal says of itself."""
    done = process("check", "--help", FORCE_COLOR="1", TERM="xterm-256color")
    assert done.stdout.isascii()
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("lineage explain KEY", {one.code for one in catalogue() if one.family == "KEY"}),
        ("lineage explain msk", {one.code.lower() for one in catalogue() if one.family == "MSK"}),
        ("lineage doc", {"doctor"}),
        ("lineage sql --j", {"--json"}),
    ],
)
@pytest.mark.slow
def test_the_shell_is_offered_codes_commands_and_options(process, typed, offered):
    """The completion Typer writes for bash asks the program, which answers with what fits."""
    done = process(
        _LINEAGE_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=str(len(typed.split()) - 1)
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert set(done.stdout.split()) == offered


def test_choices_complete_families_and_lists():
    """--select is offered families too, and behind a comma the next name."""
    from lineage.cli.completion import complete_choice

    masks = [one.code for one in catalogue() if one.family == "MSK"]
    assert ("MSK", f"all of {', '.join(masks)}") in complete_choice("")
    assert [name for name, _ in complete_choice("KEY001,MSK")] == [f"KEY001,{name}" for name in ("MSK", *masks)]


def test_the_completion_script_is_printed(process):
    """--show-completion prints what --install-completion would write."""
    done = process("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert done.returncode == 0
    assert "_LINEAGE_COMPLETE=complete_bash" in done.stdout


@pytest.mark.slow
def test_a_reader_that_leaves_is_neither_a_pass_nor_a_traceback():
    """With nobody to read, the command ends as a shell says of a broken pipe, and says nothing of it."""
    program = "from lineage.cli import main; main()"
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, "sql", str(GOOD), "select * from facts"],
            stdout=writing, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False,
        )  # fmt: skip
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("loading", "code", "says"),
    [("KeyboardInterrupt", 130, ""), ("ImportError('no duckdb')", 2, "error: no duckdb; mend the base: pip install ")],
)
def test_a_start_that_fails_is_no_traceback(loading, code, says):
    """Ctrl-C while the commands load is an interrupt; a package that cannot be imported is one line."""
    program = (
        "import sys, importlib.abc\n"
        "class Broken(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == 'lineage.cli.check': raise {loading}\n"
        "sys.meta_path.insert(0, Broken())\n"
        "from lineage.cli import main; main()"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == code
    assert done.stderr.startswith(says)
    assert len(done.stderr.splitlines()) == bool(says)


def test_a_bug_of_ours_is_no_verdict(command, monkeypatch):
    """An error nobody foresaw shows its traceback, says whose it is, and exits with 2: 1 means violations."""

    def broken(*arguments: object, **options: object) -> None:
        raise KeyError("unforeseen")

    monkeypatch.setattr("lineage.traces.open_trace", broken)
    done = command("info", GOOD)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("Traceback")
    assert "KeyError: 'unforeseen'" in done.err
    assert done.err.splitlines()[-1].startswith("error: this is a bug of lineage")


@pytest.mark.parametrize(
    "arguments", [("check", GOOD), ("info",), ("show", "u_0_0"), ("sql", "select sum(sum_in) from facts")]
)
@pytest.mark.slow
def test_a_damaged_file_is_one_line_of_every_command(command, tmp_path, arguments):
    """What DuckDB or pyarrow says of it, with its name; a good trace beside it is judged."""
    import pyarrow.parquet as pq

    data, bad = bytearray(GOOD.read_bytes()), tmp_path / "bad.parquet"
    group = pq.read_metadata(GOOD).row_group(0)
    for number in range(group.num_columns):
        one = group.column(number)
        start = one.dictionary_page_offset or one.data_page_offset
        data[start + 30 : start + one.total_compressed_size] = b"\7" * max(one.total_compressed_size - 30, 0)
    bad.write_bytes(data)
    done = command(arguments[0], bad, *arguments[1:])
    assert done.code == 2
    (line,) = done.err.splitlines()
    assert line.startswith("error: ")
    assert str(bad) in line
    assert (str(GOOD) in done.out) == (arguments[0] == "check")


@pytest.mark.parametrize("arguments", [("check", ""), ("info", ""), ("show", "", "x"), ("sql", "", "select 1")])
def test_an_empty_trace_path_is_refused(command, arguments):
    """``lineage check "$TRACE"`` without TRACE is no pass over whatever lies here."""
    done = command(*arguments, cwd=GOOD.parent)
    assert done.code == 2
    assert "the path is empty" in done.err


@pytest.mark.parametrize("arguments", [("check", str(GOOD), "--format", "json"), ("explain", "KEY001")])
@pytest.mark.slow
def test_a_full_disk_behind_standard_output_is_one_line_and_no_verdict(arguments):
    """Exit 1 would say that the trace broke a contract."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "lineage.cli", *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "No space left" in line


def test_the_commands_load_nothing_heavy():
    """No module of the command line loads torch, DuckDB, pyarrow or rich before its command runs."""
    program = (
        "import sys\n"
        "import lineage.cli.commands\n"
        "print([name for name in ('torch', 'duckdb', 'pyarrow', 'numpy', 'rich') if name in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "[]"
