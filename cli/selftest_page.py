"""The page ``lineage selftest --write`` makes of what it found: a part a whole selftest, a part random clean runs."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from lineage.cli.selftest_text import offence, only_by
from lineage.cli.trials import Kind, Outcome, Result
from lineage.errors import UserError

#: part -> the words of its place in the page
PARTS = {"selftest": "made by lineage selftest --write", "clean runs": "made by lineage selftest --clean-runs --write"}
_EMPTY = """# What the selftest found

`lineage selftest` records a small run for every fault of `lineage faults` and for every clean configuration, and judges
each by the whole catalogue. This page is what it found, as it wrote it. A configuration is clean when nothing fails and
nothing warns; of a rejection MSK002 may, as it makes two masks of one. A fault that only warnings tell of is caught if
the same run without it is silent of its code. A code that catches no fault alone says in its header which code it backs
up, and why it stays.

"""


def write(page: Path, done: Sequence[Outcome], seconds: float, jobs: int, seed: int | None) -> None:
    """Put what was found into its part of the page; the other part stays.

    Args:
        page: the Markdown file, made when it is not there.
        done: every outcome.
        seconds: time the whole took.
        jobs: worker processes.
        seed: of random clean configurations; None writes the part of a whole selftest.

    Raises:
        UserError: the page cannot be read or written.
    """
    part = _part(seed)
    body = _selftest(done, seconds, jobs) if seed is None else _clean_runs(done, seconds, jobs, seed)
    framed = _framed(part, "\n".join(body) + "\n").rstrip("\n")
    text = _place(part).sub(lambda _: framed, read(page, seed))
    try:
        page.write_text(text, "utf-8")
    except OSError as error:
        raise UserError(f"--write {page}: {error.strerror or error}") from error


def read(page: Path, seed: int | None) -> str:
    """The page as it is, a new one where there is none; asked before the work, which takes minutes.

    Raises:
        UserError: it cannot be read, or has no place for this part.
    """
    part = _part(seed)
    try:
        if not page.exists() and not page.parent.is_dir():
            raise UserError(f"--write {page}: no folder {page.parent}")
        text = page.read_text("utf-8") if page.exists() else _new()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--write {page}: {getattr(error, 'strerror', None) or 'cannot be read'}") from error
    if not _place(part).search(text):
        raise UserError(f"--write {page}: no line {_opening(part).strip()} in it; name a page this command made")
    return text


def _new() -> str:
    """A page on which nothing was found yet."""
    return _EMPTY + "".join(
        _framed(name, f"\nNot tried yet ({said.removeprefix('made by ')}).\n") for name, said in PARTS.items()
    )


def _part(seed: int | None) -> str:
    return "selftest" if seed is None else "clean runs"


def _place(part: str) -> re.Pattern[str]:
    return re.compile(re.escape(_opening(part)) + r".*?" + re.escape(_closing(part)), re.S)


def faults_on(text: str) -> list[str]:
    """The names of the faults a page lists, in its order."""
    return re.findall(r"^\| [A-Z]+\d+ \| `(\w+)` \|", text, re.M)


def _opening(part: str) -> str:
    return f"<!-- {part}: {PARTS[part]} -->\n"


def _closing(part: str) -> str:
    return f"<!-- end of {part} -->"


def _framed(part: str, body: str) -> str:
    return f"{_opening(part)}{body}{_closing(part)}\n"


def _selftest(done: Sequence[Outcome], seconds: float, jobs: int) -> Iterator[str]:
    faults, clean, laws = ([one for one in done if one.trial.kind is kind] for kind in Kind)
    codes = sorted({code for one in done for code in one.seen})
    alone = only_by(done)
    yield "## In short\n"
    yield f"- {len(faults)} faults: {_good(faults)} caught by their own code at their stage and step"
    yield f"- {len(clean)} clean configurations: {_good(clean)} clean"
    yield f"- {len(laws)} laws that need a replay: {_good(laws)} hold"
    yield f"- {len(codes)} codes; {len(alone)} of them catch a fault that no other code catches"
    yield f"- {seconds:.0f} s with {jobs} workers on {_machine()}"
    yield from (f"- {one.result}: {offence(one)}" for one in done if not one.result.good)
    yield "\n## Faults\n"
    yield from _table(("code", "fault", "stage", "other codes that fail on it"), map(_fault, faults))
    yield "\n## Codes that catch nothing alone\n"
    yield ", ".join(code for code in codes if code not in alone) or "None."
    yield "\n## Clean configurations\n"
    body = (
        (f"`{one.trial.name}`", " ".join(f"`{said}`" for said in one.trial.overrides) or "the lab's own")
        for one in clean
    )
    yield from _table(("configuration", "beyond the lab's"), body)
    if laws:
        yield "\n## Laws\n"
        from lineage.trainer.faults.laws import LAWS

        yield from (f"- `{one.trial.name}`: {LAWS[one.trial.name].says}" for one in laws)


def _clean_runs(done: Sequence[Outcome], seconds: float, jobs: int, seed: int) -> Iterator[str]:
    """The log: counts, what was not clean, and which codes never had anything to judge."""
    codes = sorted({code for one in done for code in one.seen})
    passed = {code: sum(one.seen[code].verdict == "pass" for one in done if code in one.seen) for code in codes}
    resumed = sum(bool(one.trial.resume_after) for one in done)
    yield "\n## Random clean configurations\n"
    good = _good(done)
    yield f"- `lineage selftest --clean-runs {len(done)} --seed {seed}`: {good} clean, {len(done) - good} not"
    yield f"- {resumed} of them stop at a checkpoint and go on as another run"
    yield f"- {seconds:.0f} s with {jobs} workers on {_machine()}"
    yield from (f"- {one.result}: {offence(one)}" for one in done if not one.result.good)
    never = [code for code in codes if not passed[code]]
    yield f"- codes that never saw anything to judge: {', '.join(never) or 'none'}"
    yield "\nIn how many of them a code had something to judge and passed:\n"
    yield from _table(("code", "passed in"), ((code, f"{count}") for code, count in passed.items()))


def _fault(one: Outcome) -> tuple[str, ...]:
    assert one.wanted is not None
    others = " ".join(code for code in one.failed if code != one.wanted.code)
    missed = "" if one.result is Result.CAUGHT else f"**{one.result}** "
    return one.wanted.code, f"`{one.trial.name}`", one.wanted.stage, missed + others


def _good(done: Iterable[Outcome]) -> int:
    return sum(one.result.good for one in done)


def _machine() -> str:
    return f"{os.cpu_count()} cores of {platform.machine()}, Python {platform.python_version()}"


def _table(head: Sequence[str], body: Iterable[Sequence[str]]) -> Iterator[str]:
    for cells in (head, ["---"] * len(head), *body):
        yield f"| {' | '.join(cells)} |"
