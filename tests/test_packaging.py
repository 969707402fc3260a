"""The distribution holds the tree: packages, data files, links and the arrows between the folders."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("traces", "checks", "trainer", "cli")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_packages_are_the_tree() -> None:
    """Every folder with an __init__ is listed in pyproject, under its import name, and nothing else is."""
    found = set()
    for top in ("lineage", *FOLDERS):
        for init in (ROOT / top).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT).parts
            if not any(part in FOLDERS for part in parts[1:]):  # the links in lineage/ show the same folders again
                found.add(".".join(parts if top == "lineage" else ("lineage", *parts)))
    assert found == set(PYPROJECT["tool"]["setuptools"]["packages"])


@pytest.mark.parametrize("folder", FOLDERS)
def test_links_show_the_same_tree(folder: str) -> None:
    """lineage/<folder> is a relative link to the folder at the top, for mypy and editors."""
    link = ROOT / "lineage" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("..") / folder


def test_data_files_are_packaged() -> None:
    """Every data file of the tree matches a package-data pattern."""
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]
    for top in FOLDERS:
        for path in (ROOT / top).rglob("*"):
            if path.suffix in (".sql", ".toml", ".yaml", ".parquet"):
                relative = path.relative_to(ROOT / top)
                every = [*patterns["*"], *patterns.get(f"lineage.{top}", [])]
                in_package = (path.parent / "__init__.py").exists() and any(Path(path.name).match(p) for p in every)
                assert in_package or any(relative.match(p) for p in every if "/" in p), path


def test_every_module_is_short_and_says_what_it_is() -> None:
    """No module over 450 lines; each has a docstring."""
    for top in ("lineage", *FOLDERS, "tests", "benchmarks", "scripts"):
        for path in (ROOT / top).rglob("*.py"):
            text = path.read_text()
            assert text.count("\n") <= 450, f"{path} is too long"
            assert ast.get_docstring(ast.parse(text)), f"{path} has no docstring"


def test_arrows_between_the_folders_hold() -> None:
    """The import linter's contracts are kept."""
    command = [str(Path(sys.executable).parent / "lint-imports")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "module",
    ["lineage", "lineage.traces", "lineage.checks", "lineage.cli", "lineage.checks.pytest_plugin", "lineage.testing"],
)
def test_gate_loads_without_torch(module: str) -> None:
    """The modules a CI gate uses import neither torch nor ray nor transformers."""
    program = f"import sys, {module}; print([m for m in ('torch', 'ray', 'vllm', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_module_of_the_core_is_held_by_the_strict_settings() -> None:
    """Each module of lineage/ is in mypy's strict list and in the import linter's contract for the core."""
    modules = {f"lineage.{path.stem}" for path in (ROOT / "lineage").glob("*.py") if path.stem != "__init__"}
    facades = {"lineage.testing"}  # users' tests record and judge by one import; no module of ours imports it
    strict = set(PYPROJECT["tool"]["mypy"]["overrides"][0]["module"])
    core = set(PYPROJECT["tool"]["importlinter"]["contracts"][0]["source_modules"])
    assert modules <= strict
    assert modules - facades <= core


def test_version_is_one() -> None:
    """The package and its metadata say the same version."""
    import lineage

    assert lineage.__version__ == metadata.version("rl-lineage") == PYPROJECT["project"]["version"]


def test_dependencies_have_reasons() -> None:
    """Each dependency line in pyproject carries a comment that says why."""
    text = (ROOT / "pyproject.toml").read_text()
    block = text[text.index("dependencies = [") : text.index("[project.scripts]")]
    for line in block.splitlines():
        if line.strip().startswith('"') and not line.strip().startswith('"rl-lineage['):
            assert "#" in line, line
