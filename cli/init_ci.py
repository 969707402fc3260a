"""``lineage init-ci``: a GitHub workflow and a pre-commit hook for a repository that keeps or records traces."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from lineage.cli.json_text import print_json
from lineage.errors import UserError

WORKFLOW = Path(".github/workflows/lineage.yml")
PRE_COMMIT = Path(".pre-commit-config.yaml")
_HOOK = "lineage-check"
_NEXT = {
    WORKFLOW: f"put your own run into the step 'Record a trace' of {WORKFLOW}",
    PRE_COMMIT: "pre-commit install",
}


@dataclass(frozen=True)
class Change:
    """A file to write.

    Attributes:
        path: seen from the repository's top.
        text: all of it; None leaves the file as it is.
        did: what is done to it: ``wrote``, ``added to`` or ``left``.
        why: of one that is left, why.
    """

    path: Path
    text: str | None
    did: str
    why: str = ""


def init_ci_command(
    workflow: Annotated[bool, typer.Option(help=f"Write {WORKFLOW}.")] = True,
    pre_commit: Annotated[bool, typer.Option(help=f"Write the hook to {PRE_COMMIT}, behind what is there.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Write a workflow anew that is already there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a GitHub workflow and a pre-commit hook.

    They go to the top of the git repository, or into this folder outside of one. A workflow that is there is not
    touched without --force; a pre-commit configuration is added to, never written over.
    """
    top = repository(Path.cwd())
    changes = []
    if workflow:
        changes.append(_workflow(top, force))
    if pre_commit:
        changes.append(_pre_commit(top))
    for change in changes:
        _write(top, change)
    todo = [_NEXT[change.path] for change in changes if change.text is not None]
    if as_json:
        files = [{"path": one.path, "did": one.did, "why": one.why} for one in changes]
        print_json({"folder": top, "files": files, "next": todo})
        return
    for change in changes:
        typer.echo(f"{change.did} {top / change.path}{': ' + change.why if change.why else ''}")
    if not changes:
        typer.echo("nothing to write: --no-workflow and --no-pre-commit")
    for number, line in enumerate(todo):
        typer.echo(f"{'      ' if number else 'next: '}{line}")


def template(name: str) -> str:
    """The text of a template that comes with this package."""
    return (resources.files("lineage.cli") / "templates" / name).read_text("utf-8")


def repository(folder: Path) -> Path:
    """The top of the git repository a folder is in; the folder itself outside of one."""
    return next((place for place in (folder, *folder.parents) if (place / ".git").exists()), folder)


def with_hook(text: str, hook: str) -> str | None:
    """A pre-commit configuration with a repository added to its ``repos``; None when there is no such list.

    The text is added to and not parsed and written anew, so comments and layout stay.
    """
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if re.match(r"repos:\s*(#.*)?$", line)), None)
    if start is None:
        return None
    ends = (number for number, line in enumerate(lines) if number > start and re.match(r"[^\s#-]", line))
    end = next(ends, len(lines))
    while end > start + 1 and (not lines[end - 1].strip() or lines[end - 1].startswith("#")):
        end -= 1  # blank lines and remarks before the next key are the next key's
    first = next((line for line in lines[start + 1 : end] if line.lstrip().startswith("-")), "-")
    indent = " " * (len(first) - len(first.lstrip()))
    added = [indent + line for line in hook.splitlines()]
    return "\n".join([*lines[:end], *added, *lines[end:]]) + "\n"


def _workflow(top: Path, force: bool) -> Change:
    if (top / WORKFLOW).exists() and not force:
        raise UserError(f"{top / WORKFLOW} is already there: write it anew with --force, or leave it by --no-workflow")
    return Change(WORKFLOW, template("lineage.yml"), "wrote")


def _pre_commit(top: Path) -> Change:
    file = top / PRE_COMMIT
    hook = template("pre-commit.yaml")
    if not file.exists():
        return Change(PRE_COMMIT, f"repos:\n{hook}", "wrote")
    text = _read(file)
    if re.search(rf"\bid:\s*['\"]?{_HOOK}\b", text):
        return Change(PRE_COMMIT, None, "left", f"it has the hook {_HOOK}")
    added = with_hook(text, hook)
    if added is None:
        raise UserError(f"{file}: no list 'repos:' to add the hook to; add it by hand, or leave it by --no-pre-commit")
    return Change(PRE_COMMIT, added, "added to")


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot read it: {error}") from error


def _write(top: Path, change: Change) -> None:
    if change.text is None:
        return
    file = top / change.path
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(change.text, "utf-8")
    except OSError as error:
        raise UserError(f"{file}: cannot write it: {error.strerror or error}") from error
