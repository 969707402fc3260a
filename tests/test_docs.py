"""The README and the pages of docs/ say what the program does: examples run, outputs and links are real."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest
import typer

import lineage
from lineage.checks.verdict import ExitCode
from lineage.cli import app
from lineage.cli.exit_codes import JUDGES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
GOOD = ROOT / "traces" / "samples" / "good.parquet"
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")
_FOLDERS = "lineage|traces|checks|trainer|cli|tests|benchmarks|docs|scripts"
_PATH = re.compile(rf"`((?:{_FOLDERS})/[\w./-]*)`")
_SECONDS = re.compile(r" in \d+\.\d+ s$", re.M)


def section(title: str) -> str:
    """The text of the README under one heading."""
    (found,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.M | re.S)
    return found


def block(title: str, language: str) -> str:
    """The one code block of this language under one heading."""
    (found,) = [text for name, text in _BLOCK.findall(section(title)) if name == language]
    return found


def python(program: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own."""
    return subprocess.run([sys.executable, "-c", program], cwd=cwd, capture_output=True, text=True, check=False)


def command_line(arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run ``lineage <arguments>`` as typed."""
    program = f"import sys; sys.argv[1:] = {shlex.split(arguments)!r}; from lineage.cli import main; main()"
    return python(program, cwd)


def test_the_failing_check_is_the_one_the_readme_shows() -> None:
    """The check of the bad sample prints what the README shows, but for the seconds, and exits 1."""
    command = "check -q traces/samples/bad/MSK002.parquet"
    shown = [text for name, text in _BLOCK.findall(README) if text.startswith(f"$ lineage {command}\n")]
    done = command_line(command)
    assert done.returncode == 1
    assert [_SECONDS.sub("", text) for text in shown] == [_SECONDS.sub("", f"$ lineage {command}\n{done.stdout}")]


def test_every_console_block_is_one_command_of_ours() -> None:
    """scripts/make_docs.py runs the README's console blocks; none has a shape it would pass over."""
    blocks = [text for name, text in _BLOCK.findall(README) if name == "console"]
    assert len(blocks) >= 2
    for text in blocks:
        assert re.findall(r"^\$ (\w+) ", text, re.M) == ["lineage"], text


@pytest.mark.slow
def test_pages_made_from_the_code_are_not_stale() -> None:
    """scripts/make_docs.py --check finds nothing to write."""
    command = [sys.executable, "scripts/make_docs.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_stale_page_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A column whose meaning changed makes the schema page stale."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import make_docs

    monkeypatch.setattr(make_docs, "with_outputs", lambda text: text)
    monkeypatch.setattr(make_docs, "schema_page", lambda: "another page")
    assert ROOT / "docs" / "schema.md" in make_docs.stale(make_docs.pages())


def test_a_changed_option_or_template_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another reference of the command line makes its page stale, and another template the page that shows it."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import make_docs

    monkeypatch.setattr(make_docs, "with_outputs", lambda text: text)
    monkeypatch.setattr(make_docs, "cli_page", lambda: "another page")
    gates = (ROOT / "docs" / "ci.md").read_text("utf-8")
    assert make_docs.with_files(gates) == gates
    monkeypatch.setattr(make_docs, "with_files", lambda text: text.replace("runs-on", "runs_on"))
    assert {ROOT / "docs" / "cli.md", ROOT / "docs" / "ci.md"} <= set(make_docs.stale(make_docs.pages()))


def test_a_page_of_a_code_links_its_reports_and_says_when_it_only_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issues, pull requests and commits are links; a code that only warns keeps no gate, and its sample exits 0."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import make_docs

    from lineage.checks.catalogue import get

    page = make_docs.code_page(replace(get("QUE006"), reports=("a-b/c.d#12", "a/b@1a2b3c")))
    assert (
        "[a-b/c.d#12](https://github.com/a-b/c.d/issues/12), [a/b@1a2b3c](https://github.com/a/b/commit/1a2b3c)" in page
    )
    assert "warning: lineage check exits 0 on it unless --max-warnings 0" in page
    assert "bad/QUE006.parquet): warns, exit code 0 |" in page
    assert "warns, exit code 0" not in make_docs.code_page(get("KEY001"))
    with pytest.raises(ValueError, match="no reference such as"):
        make_docs.linked("see the tracker")


def test_the_page_on_ci_shows_every_template() -> None:
    """docs/ci.md holds each file that lineage init-ci writes, word for word."""
    page = (ROOT / "docs" / "ci.md").read_text("utf-8")
    templates = sorted((ROOT / "cli" / "templates").iterdir())
    assert templates
    for template in templates:
        assert f"```yaml\n{template.read_text('utf-8')}```\n" in page, template.name


@pytest.mark.parametrize("name", [None, *COMMANDS])
def test_every_command_and_every_option_has_help(name: str | None) -> None:
    """Help says what each command, argument and option is for, and which exit codes there are."""
    command = typer.main.get_command(app) if name is None else COMMANDS[name]
    assert command.help
    assert "Exit codes:" in command.epilog
    for parameter in command.params:
        assert parameter.help, parameter.name


def test_the_reference_names_every_option() -> None:
    """Every argument and option of every command stands in docs/cli.md under its command."""
    page = (ROOT / "docs" / "cli.md").read_text("utf-8")
    for name, command in COMMANDS.items():
        (text,) = re.findall(rf"^## `lineage {name}`\n(.*?)(?=^## )", page, re.M | re.S)
        for parameter in command.params:
            shown = parameter.opts if parameter.param_type_name == "option" else [parameter.metavar or parameter.name]
            assert all(re.search(rf"^\* `[^`]*{re.escape(word)}", text, re.M) for word in shown), parameter.name


def test_every_variable_the_program_reads_is_on_the_page() -> None:
    """Each environment variable named in the code is in the table of docs/cli.md."""
    page = (ROOT / "docs" / "cli.md").read_text("utf-8")
    read = re.compile(
        r"""(?:environ(?:\.get|\.setdefault)?[\[(]\s*["'](?=[A-Z])|["'](?=(?:LINEAGE|GITHUB)_))([A-Z0-9_]+)["']"""
    )
    folders = ("lineage", "traces", "checks", "trainer", "cli")
    named = {name for top in folders for file in (ROOT / top).rglob("*.py") for name in read.findall(file.read_text())}
    assert "LINEAGE_DISABLED" in named
    assert {name for name in named if f"| `{name}` |" not in page} == set()


def test_the_recorder_example_is_ten_lines_and_checks_clean(tmp_path: Path) -> None:
    """The example runs as written, leaves three whole steps, and its check exits 0."""
    example = block("Record your own loop", "python")
    assert len([line for line in example.splitlines() if line.strip()]) == 10
    done = python(example, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with lineage.open(tmp_path / "runs" / "mine" / "trace.parquet") as trace:
        answer = trace.sql("select global_steps, policy_tokens from steps order by all").fetchall()
    assert answer == [(1, 3), (2, 3), (3, 3)]
    check = command_line("check runs/mine", tmp_path)
    assert (check.returncode, check.stderr) == (0, "")
    assert re.search(r"^MSK002 .* pass ", check.stdout, re.M)


@pytest.mark.slow
def test_the_recorder_example_with_another_mask_fails_as_said(tmp_path: Path) -> None:
    """The change the README proposes breaks MSK002 at step 1, stage advantage."""
    example = block("Record your own loop", "python")
    other = re.search(r"`(mask=\[\[.*?\]\])`", section("Record your own loop"))
    assert other is not None
    assert example.count("mask=mask") == 1
    assert python(example.replace("mask=mask", other[1]), tmp_path).returncode == 0
    check = command_line("check runs/mine", tmp_path)
    assert check.returncode == 1
    assert re.match(r"MSK002 .*: first broken at step 1, stage advantage\n", check.stdout)


def test_the_duckdb_lines_run_without_ours() -> None:
    """The lines run as written and import nothing of this package."""
    lines = block("What a trace looks like", "python")
    done = python(f"{lines}\nimport sys\nassert not [name for name in sys.modules if name.startswith('lineage')]", ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_duckdb_lines_answer_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean policy_len a step, the producers of every field, every stage: as our own views have them."""
    answers = []

    def sql(query: str) -> str:
        answers.append(ask(query).fetchall())
        return ""

    ask = duckdb.sql
    monkeypatch.setattr(duckdb, "sql", sql)
    monkeypatch.chdir(ROOT)
    exec(block("What a trace looks like", "python"), {})
    policy_len, producers, stages = answers
    query = "select global_steps, policy_len_mean from steps where trajectories > 0 order by all"
    with lineage.open(GOOD) as trace:
        wanted = trace.sql(query).fetchall()
        fields = {name for (name,) in trace.sql("select distinct field from rows where op = 'produce'").fetchall()}
        named = {name for (name,) in trace.sql("select distinct stage from rows").fetchall()}
    assert policy_len == [(step, pytest.approx(mean)) for step, mean in wanted]
    assert all(names for _, names in producers)
    assert fields <= {name for name, _ in producers}
    assert {stage for stage, *_ in stages} == named


def test_the_list_of_commands_is_the_command_line() -> None:
    """The table names every command once, and each option it names is one of that command's."""
    rows = re.findall(r"^\| `lineage ([\w-]+)[^`]*` \| (.*) \|$", section("Commands"), re.M)
    assert sorted(name for name, _ in rows) == sorted(COMMANDS)
    for name, text in rows:
        options = {option for parameter in COMMANDS[name].params for option in parameter.opts}
        assert set(re.findall(r"`(--?[a-z][a-z-]*)[^`]*`", text)) <= options, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_a_page_names_exists(page: Path) -> None:
    """``lineage <word>`` at the start of code is a command."""
    named = re.findall(r"(?:`|^\$ |^|&& )lineage ([a-z]+(?:-[a-z]+)*)\b", page.read_text("utf-8"), re.M)
    assert set(named) <= set(COMMANDS)


def test_the_exit_codes_are_the_program_s() -> None:
    """The table lists every exit code of the program and no other."""
    listed = {int(code): said for code, said in re.findall(r"^\| (\d+) \| (.*) \|$", section("Commands"), re.M)}
    assert listed == {int(code): said for code, said in JUDGES.items()}
    assert set(JUDGES) == set(ExitCode)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_leads_somewhere(page: Path) -> None:
    """Links between pages, their headings, and paths of this repository named in code all exist."""
    text = page.read_text("utf-8")
    for target in _LINK.findall(text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, heading = target.partition("#")
        aimed = (page.parent / path).resolve() if path else page
        assert aimed.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", aimed.read_text("utf-8"), re.M)
            assert heading in {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}, target
    for path in _PATH.findall(text):
        assert (ROOT / path).exists(), path


def test_the_tree_has_a_line_for_each_folder() -> None:
    """The tree names the folders of the repository, each with a word on what it is for."""
    listed = dict(re.findall(r"^([\w.]+)/ +(\S.*)$", block("The tree", ""), re.M))
    assert all((ROOT / folder).is_dir() for folder in listed)
    ours = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert set(listed) == ours | {"tests", "benchmarks", "docs", "scripts", ".ci"}


def test_the_set_up_lines_name_extras_that_exist() -> None:
    """Each extra in a pip line of the README is one of the distribution."""
    from importlib import metadata

    known = set(metadata.metadata("rl-lineage").get_all("Provides-Extra") or ())
    named = {name for names in re.findall(r"\.\[([\w,]+)\]", README) for name in names.split(",")}
    assert named
    assert named <= known


def test_the_readme_s_overrides_are_known() -> None:
    """The overrides of the README's run commands compose to a valid configuration."""
    from lineage.trainer.config import compose, validate_config

    lines = re.findall(r"^lineage run (.+)$", README, re.M)
    assert lines
    for line in lines:
        validate_config(compose(shlex.split(line)))
