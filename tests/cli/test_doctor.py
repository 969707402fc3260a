"""``lineage doctor``: what it finds in an environment that is sound, and in ones that are not."""

from __future__ import annotations

import importlib
import json
from importlib import metadata
from pathlib import Path

import pytest

from lineage.cli import installed
from lineage.errors import UserError

doctor = importlib.import_module("lineage.cli.doctor")


@pytest.fixture
def requires(monkeypatch):
    """Make the distribution ask for other packages than it does."""

    def ask(*lines: str, extras: tuple[str, ...] = ()) -> None:
        monkeypatch.setattr(metadata, "requires", lambda name: list(lines))
        real = metadata.metadata
        said = type("Said", (), {"get_all": lambda self, name: list(extras)})()
        monkeypatch.setattr(metadata, "metadata", lambda name: said if name == "rl-lineage" else real(name))

    return ask


def test_a_sound_base_exits_zero(command):
    """Versions of everything the distribution asks for, and no pip line for the base."""
    done = command("doctor")
    assert (done.code, done.err) == (0, "")
    assert f"base       pyarrow {metadata.version('pyarrow')}" in done.out.splitlines()
    assert done.out.splitlines()[-1] == "the base is sound"


def test_json_holds_the_diagnosis(command):
    """The base and the extras are those of the distribution's own metadata."""
    said = json.loads(command("doctor", "--json").out)
    assert said["sound"] is True
    assert {"pyarrow", "duckdb", "typer"} <= {one["name"] for one in said["base"]}
    assert [one["name"] for one in said["extras"]] == metadata.metadata("rl-lineage").get_all("Provides-Extra")
    (dev,) = [one for one in said["extras"] if one["name"] == "dev"]
    assert "torch" in {one["name"] for one in dev["packages"]}  # dev is made of train and more


def test_what_is_wrong_with_the_base_exits_one_with_the_line_that_mends_it(command, requires, monkeypatch):
    """Missing, of the wrong version, and installed but broken are told apart."""

    def broken(name: str) -> None:
        if name == "rich":
            raise OSError("no such symbol\nat 0x7")

    monkeypatch.setattr(installed, "import_module", broken)
    requires("numpy", "no-such-package>=3", "pyarrow>=999", "rich>=1", 'pywin32; sys_platform == "no-such-system"')
    done = command("doctor")
    assert (done.code, done.err) == (1, "")
    lines = done.out.splitlines()
    assert "base       no-such-package is MISSING, wanted >=3" in lines
    assert f"base       pyarrow {metadata.version('pyarrow')} WRONG VERSION, wanted >=999" in lines
    assert f"base       rich {metadata.version('rich')} BROKEN, wanted >=1: no such symbol" in lines
    assert "pywin32" not in done.out
    assert lines[-1] == (
        "the base is not sound; mend it: "
        'pip install --force-reinstall "no-such-package>=3" "pyarrow>=999" "rich>=1"'
    )  # fmt: skip


def test_an_extra_that_is_missing_is_no_failure_and_says_how_to_get_it(command, requires):
    """Packages that are absent or too old are named with the pip line of their extra."""
    requires(
        "rich",
        'no-such-package>=3; extra == "train"',
        'pyarrow>=999; extra == "train"',
        'rich; extra == "loggers"',
        'rl-lineage[train]; extra == "dev"',
        extras=("train", "loggers", "dev"),
    )
    done = command("doctor")
    assert done.code == 0
    lack = f"no no-such-package, pyarrow {metadata.version('pyarrow')} is not >=999"
    lines = done.out.splitlines()
    assert f'extra      train: {lack}; pip install "rl-lineage[train]"' in lines
    assert "extra      loggers: installed" in lines
    assert f'extra      dev: {lack}; pip install "rl-lineage[dev]"' in lines


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("__version__ = '2.13.0'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", "2.13.0, CUDA 12.8"),
        ("cuda = None\nhip = '6.4'\n", "2.13.0, ROCm 6.4"),
        ("cuda = None\n", "2.13.0, CPU"),
    ],
)
def test_the_build_of_torch_is_read_without_running_it(tmp_path, monkeypatch, text, build):
    """torch/version.py says CPU, CUDA or ROCm; torch itself is not imported."""
    (tmp_path / "version.py").write_text(text)
    torch = type("Torch", (), {"version": "2.13.0", "locate_file": lambda self, name: tmp_path / Path(name).name})()
    monkeypatch.setattr(metadata, "distribution", lambda name: torch)
    assert installed.torch_build() == build


def test_tracing_that_is_off_and_runs_that_cannot_be_written_are_said(command, monkeypatch, tmp_path):
    """LINEAGE_DISABLED, and a file where the folder of runs would be."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LINEAGE_DISABLED", "1")
    (tmp_path / "runs").write_text("")
    lines = command("doctor").out.splitlines()
    assert "tracing    LINEAGE_DISABLED=1: any value but 0 switches it off" in lines
    assert "runs       runs cannot be written" in lines


def test_plugins_of_others_are_listed(monkeypatch):
    """Entry points of the group lineage are anybody's; of pytest's only ours are named."""
    ours = metadata.EntryPoint("lineage", "lineage.checks.pytest_plugin", "pytest11")
    other = metadata.EntryPoint("cov", "pytest_cov.plugin", "pytest11")
    theirs = metadata.EntryPoint("house", "house.rules", "lineage")
    every = {"pytest11": [ours, other], "lineage": [theirs]}
    monkeypatch.setattr(metadata, "entry_points", lambda group: every.get(group, []))
    assert [(one.name, one.loads) for one in installed.plugins()] == [
        ("lineage", "lineage.checks.pytest_plugin"),
        ("house", "house.rules"),
    ]


def test_a_tree_that_is_not_installed_is_one_line(monkeypatch):
    """Without metadata there is nothing to compare with."""

    def unknown(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", unknown)
    with pytest.raises(UserError, match=r"^rl-lineage is not installed .* pip install -e \.$"):
        installed.base()
