"""``lineage init-ci``: what it writes, what it leaves alone, and that GitHub and pre-commit can read it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from lineage.cli.init_ci import PRE_COMMIT, WORKFLOW, template, with_hook

ROOT = Path(__file__).parents[2]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A git repository, seen from a folder inside it."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "src").mkdir()
    monkeypatch.chdir(tmp_path / "src")
    return tmp_path


def test_both_files_are_written_to_the_top_of_the_repository(command, repository):
    """What was written and what to do next are said."""
    done = command("init-ci")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == [
        f"wrote {repository / WORKFLOW}",
        f"wrote {repository / PRE_COMMIT}",
        f"next: put your own run into the step 'Record a trace' of {WORKFLOW}",
        "      pre-commit install",
    ]
    assert (repository / WORKFLOW).read_text("utf-8") == template("lineage.yml")
    hooks = yaml.safe_load((repository / PRE_COMMIT).read_text("utf-8"))["repos"]
    assert [hook["id"] for repo in hooks for hook in repo["hooks"]] == ["lineage-check"]


def test_a_workflow_that_is_there_is_left_and_nothing_else_is_written(command, repository):
    """Without --force the whole command is refused in one line; with it the workflow is written anew."""
    (repository / WORKFLOW).parent.mkdir(parents=True)
    (repository / WORKFLOW).write_text("mine")
    done = command("init-ci")
    assert (done.code, done.out) == (2, "")
    (line,) = done.err.splitlines()
    assert line.startswith(f"error: {repository / WORKFLOW} is already there")
    assert (repository / WORKFLOW).read_text() == "mine"
    assert not (repository / PRE_COMMIT).exists()
    assert command("init-ci", "--no-pre-commit", "--force").code == 0
    assert (repository / WORKFLOW).read_text("utf-8") == template("lineage.yml")


def test_a_pre_commit_configuration_is_added_to_once(command, repository):
    """Its own hooks and remarks stay, and a second time nothing is added, not even by --force."""
    (repository / PRE_COMMIT).write_text("# ours\nrepos: # all\n- repo: meta\n  hooks:\n  - id: identity\n")
    assert command("init-ci", "--no-workflow").out.splitlines()[0] == f"added to {repository / PRE_COMMIT}"
    text = (repository / PRE_COMMIT).read_text("utf-8")
    assert text.startswith("# ours\nrepos: # all\n- repo: meta\n")
    assert [repo["repo"] for repo in yaml.safe_load(text)["repos"]] == ["meta", "local"]
    done = json.loads(command("init-ci", "--no-workflow", "--force", "--json").out)
    assert done["files"] == [{"path": str(PRE_COMMIT), "did": "left", "why": "it has the hook lineage-check"}]
    assert (repository / PRE_COMMIT).read_text("utf-8") == text


@pytest.mark.parametrize(
    "text",
    [
        "repos:\n- repo: meta\n  hooks:\n  - id: a\n",
        "repos:\n  - repo: meta\n    hooks:\n      - id: a\n\n# of the next\nci:\n  skip: [a]\n",
        "exclude: ^docs/\nrepos:\n    # first\n    -   repo: meta\n        hooks:\n        -   id: a",
    ],
)
def test_the_hook_joins_the_list_however_it_is_laid_out(text):
    """Any indent, keys before or behind, no last line end: the list has one more, and the rest is as it was."""
    before = yaml.safe_load(text)
    after = yaml.safe_load(with_hook(text, template("pre-commit.yaml")))
    *kept, added = after.pop("repos")
    assert kept == before.pop("repos")
    assert added == yaml.safe_load(template("pre-commit.yaml"))[0]
    assert after == before


def test_a_configuration_without_such_a_list_is_refused(command, repository):
    """A list in one line cannot be added to as text; nothing is written."""
    (repository / PRE_COMMIT).write_text("repos: []\n")
    done = command("init-ci")
    assert done.code == 2
    assert done.err.startswith(f"error: {repository / PRE_COMMIT}: no list 'repos:'")
    assert not (repository / WORKFLOW).exists()


def test_the_workflow_checks_uploads_and_asks_for_no_more_rights():
    """The check's options are ours, the report is uploaded whatever the check found, and rights are the least."""
    workflow = yaml.safe_load(template("lineage.yml"))
    assert set(workflow[True]) == {"push", "pull_request"}  # YAML 1.1 reads `on` as true
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    assert job["permissions"] == {"contents": "read", "actions": "read", "security-events": "write"}
    steps = {step.get("uses", "").partition("@")[0] or step["name"]: step for step in job["steps"]}
    upload = steps["github/codeql-action/upload-sarif"]
    assert upload["with"]["sarif_file"] == "lineage.sarif"
    assert upload["if"].startswith("always()")
    assert steps["actions/upload-artifact"]["if"] == "always()"
    assert "Record a trace" in steps
    assert "YOURS" in template("lineage.yml")


@pytest.mark.parametrize(("code", "kept"), [(0, True), (1, True), (2, False), (3, True)])
def test_the_workflow_keeps_the_report_of_a_trace_that_was_judged(tmp_path, code, kept):
    """Its script ends as the check does; a report on nothing is not uploaded, where it would close every alert."""
    (job,) = yaml.safe_load(template("lineage.yml"))["jobs"].values()
    (script,) = [step["run"] for step in job["steps"] if step.get("name") == "Check the trace"]
    fake = tmp_path / "lineage"
    fake.write_text(f'#!/bin/sh\necho "$@" > arguments; : > lineage.sarif; exit {code}\n')
    fake.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TRACE": "runs/latest"}
    done = subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, env=environment, check=False)
    assert done.returncode == code
    assert (tmp_path / "lineage.sarif").exists() is kept
    said = (tmp_path / "arguments").read_text()
    assert said == "check runs/latest --format github --output sarif=lineage.sarif\n"


def test_the_options_of_the_templates_are_those_of_check(command):
    """Workflow and hooks call ``lineage check`` with options it has."""
    options = command("check", "--help").out
    hooks = [template("pre-commit.yaml"), (ROOT / ".pre-commit-hooks.yaml").read_text("utf-8")]
    (theirs,), (ours,) = (yaml.safe_load(text) for text in hooks)
    (job,) = yaml.safe_load(template("lineage.yml"))["jobs"].values()
    lines = [theirs["hooks"][0]["entry"], ours["entry"]]
    runs = [line.strip() for step in job["steps"] for line in step.get("run", "").splitlines()]
    lines += [line.partition("&&")[0] for line in runs if line.startswith("lineage check")]
    assert len(lines) == 3
    used = {word for line in lines for word in shlex.split(line) if word.startswith("-")}
    assert all(option in options for option in used)


def test_both_hooks_take_parquet_files():
    """The hook for other repositories and the local one have one name and want the same files, all in one process."""
    (ours,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))
    theirs = yaml.safe_load(template("pre-commit.yaml"))[0]["hooks"][0]
    for key in ("id", "files", "entry", "require_serial"):
        assert ours[key] == theirs[key]
    assert ours["language"] == "python"
