"""Invariants in Python, from an installed distribution: judged like the catalogue's, or one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import lineage
from lineage.checks import Kind
from lineage.checks.catalogue import CatalogueError, available, catalogue
from lineage.checks.plugins import PluginError, _installed
from lineage.schema import META_CONFIG

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "own_checks"
GOOD = ROOT / "traces" / "samples" / "good.parquet"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Put a distribution named some-checks, whose entry point is this module, on the path."""

    def install(text: str, value: str = "some_checks_of_a_test") -> Path:
        site = tmp_path / "site"
        about = site / "some_checks-1.0.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: some-checks\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[lineage]\nsome = {value}\n")
        (site / "some_checks_of_a_test.py").write_text(text)
        monkeypatch.syspath_prepend(site)
        _installed.cache_clear()
        return site

    yield install
    sys.modules.pop("some_checks_of_a_test", None)
    _installed.cache_clear()


PLUGIN = """
from lineage.checks import Finding, hookimpl, invariant

@invariant(code="PLUG001", name="a plugin's", says="x", examines="select count(*) from events", {options})
def check(tables):
    {body}

@hookimpl
def lineage_invariants():
    return {given}
"""


def plugin(body: str = "return []", given: str = "[check]", options: str = "") -> str:
    """Text of a module with one invariant."""
    return PLUGIN.format(body=body, given=given, options=options)


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "lineage.cli", *arguments],
        capture_output=True, text=True, check=False, env=os.environ | environment,
    )  # fmt: skip


def test_a_plugin_s_invariant_is_part_of_every_check(installed: Callable[[str], Path], monkeypatch) -> None:
    """It sees the tables, its findings are violations, and what it does to the tables is undone."""
    body = (
        "found = tables.sql(\"select rid from events where field = 'responses'\").fetchall()\n"
        "    tables.suspect(rid for (rid,) in found)\n"
        "    for rid, key in tables.sql('select min(rid), min(key) from elements').fetchall():\n"
        "        yield Finding(rid, key, expected=1, actual=None, severity='warning')\n"
        "        yield Finding(rid, expected=[tables.profile.name], actual=tables.trace.state.complete)"
    )
    installed(plugin(body))
    report = lineage.check(GOOD, select=["PLUG001", "MSK"])
    verdict = report.verdict("PLUG001")
    assert (verdict.kind, verdict.errors, verdict.warnings) == (Kind.FAIL, 1, 1)
    assert {(one.key is None, one.expected, one.actual) for one in verdict.violations} == {
        (False, "1", None),
        (True, "['lineage']", "True"),
    }
    monkeypatch.setenv("LINEAGE_NO_PLUGINS", "1")
    assert available() == catalogue()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import no_such_module_at_all", "ModuleNotFoundError: No module named 'no_such_module_at_all'; mend it, "),
        ("raise SystemExit(0)", "SystemExit: 0; "),
        ("x = 1", "TypeError: no function lineage_invariants marked with lineage.checks.hookimpl; "),
        (plugin(given="3"), "TypeError: 'int' object is not iterable; "),
        (plugin(given="[3]"), "TypeError: it gave a int, an Invariant is wanted: see lineage.checks.invariant; "),
        (plugin(given="1 / 0"), "ZeroDivisionError: division by zero; "),
        (
            plugin(options="needs=['kye']"),
            "CatalogueError: some_checks_of_a_test.check: needs kye: no such column; did",
        ),
        (plugin().replace("lineage_invariants", "lineage_invariant"), "PluginValidationError: unknown hook"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_one_line(text: str, said: str, installed: Callable[[str], Path]) -> None:
    """The line names the distribution and the entry point, and says what to do about it."""
    installed(text)
    with pytest.raises(PluginError) as caught:
        lineage.check(GOOD)
    where = "some-checks (entry point some = some_checks_of_a_test): "
    assert str(caught.value).startswith(where + said)
    assert str(caught.value).endswith("; mend it, pip uninstall some-checks, or set LINEAGE_NO_PLUGINS=1")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return [1]", "it raised TypeError: it gave a int, a Finding is wanted"),
        ("return 1 / 0", "it raised ZeroDivisionError: division by zero"),
        ("raise SystemExit(0)", "it raised SystemExit: 0"),
        ("return [Finding(-1)]", "1 of its rows have a rid that events does not have"),
        ("return [Finding('x')]", "it raised ValueError: invalid literal for int() with base 10: 'x'"),
        ("return tables.sql('drop view rows')", "DROP is refused; a check reads this trace and no other file"),
        ("return tables.sql('select nope').fetchall()", 'Binder Error: Referenced column "nope" '),
        (
            "return tables.trace.connection.commit() or []",
            "it ended the transaction it runs in; a check may not commit",
        ),
    ],
)
@pytest.mark.slow
def test_a_plugin_s_check_that_fails_is_one_line(body: str, said: str, installed: Callable[[str], Path]) -> None:
    """The line names the distribution and the code."""
    installed(plugin(body))
    with pytest.raises(CatalogueError) as caught:
        lineage.check(GOOD, select=["PLUG"])
    assert str(caught.value).startswith(f"some-checks: PLUG001: {said}")
    assert "\n" not in str(caught.value)


def test_what_a_plugin_prints_is_not_part_of_the_report(installed: Callable[[str], Path], capsys) -> None:
    """Standard output is the report's: JSON stays JSON."""
    installed(plugin("print('hello'); return []"))
    assert lineage.check(GOOD, select=["PLUG"]).ok
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "hello\n")


def test_a_plugin_cannot_take_a_code_of_the_catalogue(installed: Callable[[str], Path]) -> None:
    """Nor one of a file."""
    installed(plugin().replace("PLUG001", "KEY001"))
    with pytest.raises(CatalogueError, match=r"some-checks: the code KEY001 is taken by lineage's own KEY001\.sql"):
        available()


@pytest.mark.slow
def test_plugins_are_imported_when_traces_are_checked_and_not_before(installed: Callable[[str], Path]) -> None:
    """Not by importing lineage.checks and its pytest plugin, nor by opening a trace."""
    site = installed("raise RuntimeError('imported')")
    program = (
        "import lineage, lineage.checks, lineage.checks.pytest_plugin\n"
        f"lineage.open({str(GOOD)!r}).close()\n"
        "try: lineage.checks.check\nfinally: print('quiet')\n"
        f"lineage.check({str(GOOD)!r})\n"
    )
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout == "quiet\n"
    assert "PluginError: some-checks (entry point some" in done.stderr


@pytest.mark.slow
def test_the_example_s_package_installs_and_judges(tmp_path: Path) -> None:
    """Installed, its code is in the report of a plain check, and it fails on a prompt that is too long for it."""
    pytest.importorskip("setuptools", minversion="77")
    source, site = tmp_path / "plugin", tmp_path / "site"
    shutil.copytree(EXAMPLE / "plugin", source)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(source)], check=True, capture_output=True)
    done = command("check", str(GOOD), "--json", "--select", "TEAM101,KEY", PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    assert "TEAM101" in done.stdout
    said = pq.read_metadata(GOOD).metadata
    config = json.loads(said[META_CONFIG])
    config["data"]["max_prompt_length"] = 60
    short = pq.read_table(GOOD).replace_schema_metadata(said | {META_CONFIG: json.dumps(config).encode()})
    pq.write_table(short, tmp_path / "short.parquet")
    done = command("check", str(tmp_path / "short.parquet"), PYTHONPATH=str(site))
    assert done.returncode == 1
    assert done.stdout.startswith("TEAM101 prompts leave room for turns: first broken at step 1, stage rollout")
    quiet = command("check", str(GOOD), "--select", "TEAM101", PYTHONPATH=str(site), LINEAGE_NO_PLUGINS="1")
    assert quiet.returncode == 2
    assert quiet.stderr.startswith("error: no invariant 'TEAM101'; ")
