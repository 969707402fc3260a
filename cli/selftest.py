"""``lineage selftest``: the catalogue proven on this machine: every fault caught, every clean configuration clean."""

from __future__ import annotations

import contextlib
import importlib.util
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from lineage.checks.verdict import ExitCode
from lineage.cli import selftest_page, selftest_text
from lineage.cli.completion import complete_choice
from lineage.cli.extras import need_extra
from lineage.cli.json_text import print_json
from lineage.cli.trials import Kind, Outcome, Trial, on_ray, on_vllm, outcomes, said
from lineage.errors import UserError


def selftest_command(
    faults: Annotated[
        list[str] | None,
        typer.Option("--fault", metavar="NAME", help="This fault alone; print its headline.", show_default=False),
    ] = None,
    codes: Annotated[
        list[str] | None,
        typer.Option(
            "--code",
            metavar="CODE",
            help="The faults of this code, or of this family of codes (KEY), alone.",
            autocompletion=complete_choice,
            show_default=False,
        ),
    ] = None,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="Faults only, all or those chosen; print which codes fail on which.")
    ] = False,
    clean_runs: Annotated[
        int | None,
        typer.Option(
            "--clean-runs",
            metavar="N",
            min=1,
            help="So many random clean configurations alone.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of the random configurations.", show_default="0")] = None,
    laws: Annotated[
        bool | None,
        typer.Option("--laws/--no-laws", help="Try the laws that need a replay as well.", show_default="laws"),
    ] = None,
    mode: Annotated[
        str,
        typer.Option("--mode", metavar="embedded|ray", help="ray: the faults between processes, on a Ray cluster."),
    ] = "embedded",
    jobs: Annotated[int, typer.Option("--jobs", "-j", metavar="N", min=1, help="Worker processes.")] = 2,
    keep: Annotated[Path | None, typer.Option("--keep", metavar="DIR", help="Keep the traces there.")] = None,
    page: Annotated[
        Path | None, typer.Option("--write", metavar="FILE", help="Write what was found to this Markdown page.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Try the catalogue on the tiny model: clean configurations, every fault, the laws that need a replay.

    Each is a small run of its own, recorded and judged by every code. Exits 1 when a fault is missed or blamed on
    another code, stage or step, when a clean configuration is not clean (a warning is enough), or when a law is
    broken. --fault or --code may be repeated.
    """
    need_extra("train", "lineage selftest")
    if mode not in ("embedded", "ray"):
        raise UserError(f"--mode {mode}: choose embedded or ray")
    if mode == "ray":
        need_extra("ray", "lineage selftest --mode ray")
        if matrix or clean_runs or laws or page is not None:
            raise UserError(
                "--mode ray tries the faults between processes: leave --matrix, --clean-runs, --laws, --write out"
            )
        jobs = 1  # each run starts a cluster of its own, which has the machine to itself
    if faults and codes:
        raise UserError("--fault names faults, --code those of a code: give one of the two")
    if clean_runs and (faults or codes or matrix):
        raise UserError("--clean-runs tries no fault: leave --fault, --code, --matrix out")
    if seed is not None and clean_runs is None:
        raise UserError("--seed is that of random configurations: give --clean-runs N as well, or leave it out")
    if laws is not None and (faults or codes or matrix or clean_runs):
        said_laws = "--laws" if laws else "--no-laws"
        raise UserError(f"{said_laws} is for a whole selftest: leave --fault, --code, --matrix, --clean-runs out")
    if page is not None and (faults or codes or matrix):
        raise UserError(
            "--write takes what a whole selftest finds, or --clean-runs: leave --fault, --code, --matrix out"
        )
    runs_seed = None if clean_runs is None else seed or 0
    if page is not None:
        selftest_page.read(page, runs_seed)
    if keep is not None:
        _make(keep)
    try:
        trials = (
            _trials_on_ray(faults or (), codes or ())
            if mode == "ray"
            else _trials(faults or (), codes or (), matrix, clean_runs or 0, runs_seed, laws is not False)
        )
    except KeyboardInterrupt:  # the trainer takes seconds to load
        typer.echo("interrupted before the first trial", err=True)
        raise
    if any(on_ray(one) for one in trials):
        need_extra("ray", "a fault between processes")
    trials, left_out = _without_vllm(trials, named=bool(faults))
    began = time.perf_counter()
    done = _run(trials, jobs, keep)
    seconds = time.perf_counter() - began
    failed = [one for one in done if not one.result.good]
    if as_json:
        print_json(
            {"ok": not failed, "seconds": round(seconds, 1), "jobs": jobs, "trials": [said(one) for one in done]}
            | ({"left_out": left_out} if left_out else {})
        )
    else:
        for line in selftest_text.lines(done, seconds, jobs, each=bool(faults) and not matrix, matrix=matrix):
            typer.echo(line)
        if left_out:
            typer.echo(f"left out, as vLLM is not installed here: {', '.join(left_out)}")
    if page is not None:  # last: what was found is said whatever becomes of the page
        selftest_page.write(page, done, seconds, jobs, runs_seed)
    raise typer.Exit(ExitCode.VIOLATIONS if failed else ExitCode.PASS)


def _trials(
    names: Sequence[str], codes: Sequence[str], matrix: bool, clean_runs: int, seed: int | None, laws: bool
) -> list[Trial]:
    """What is asked for: faults first, so that clean runs show what a fault left behind in a worker."""
    from lineage.checks.catalogue import select
    from lineage.trainer.faults.clean import clean_configurations
    from lineage.trainer.faults.configurations import draw
    from lineage.trainer.faults.laws import LAWS
    from lineage.trainer.faults.registry import all_faults, find_fault

    if clean_runs:
        source = random.Random(seed)
        drawn = [draw(source) for _ in range(clean_runs)]
        return [Trial(Kind.CLEAN, f"random {i}", one.overrides, one.resume_after) for i, one in enumerate(drawn)]
    chosen = [find_fault(name) for name in dict.fromkeys(names)]
    wanted = {one.code for one in select(codes)} if codes else set()
    chosen += [one for one in all_faults().values() if wanted.intersection((one.code, *one.also))]
    if names or codes:
        if not chosen:
            raise UserError(f"no fault of {', '.join(sorted(wanted))}: lineage faults lists them")
        return [Trial(Kind.FAULT, one.name) for one in chosen]
    every = [Trial(Kind.FAULT, name) for name in all_faults()]
    if not matrix:
        every += [Trial(Kind.CLEAN, name, overrides) for name, overrides in clean_configurations().items()]
        every += [Trial(Kind.LAW, name) for name in LAWS if laws]
    return every


def _trials_on_ray(names: Sequence[str], codes: Sequence[str]) -> list[Trial]:
    """The faults between processes, all or those asked for, and with all of them clean runs of two and four ranks."""
    from lineage.checks.catalogue import select
    from lineage.trainer.faults.clean import ON_RAY
    from lineage.trainer.faults.registry import all_faults, find_fault

    known = all_faults("ray")
    wanted = {one.code for one in select(codes)} if codes else set()
    chosen = [find_fault(name) for name in dict.fromkeys(names)]
    if names or codes:
        chosen += [one for one in known.values() if one.code in wanted]
        if not chosen:
            raise UserError(f"no fault between processes is of {', '.join(codes)}: lineage faults lists them")
        return [Trial(Kind.FAULT, one.name) for one in chosen]
    return [
        *(Trial(Kind.FAULT, name) for name in known),
        *(Trial(Kind.CLEAN, name, overrides) for name, overrides in ON_RAY.items()),
    ]


def _without_vllm(trials: Sequence[Trial], named: bool) -> tuple[list[Trial], list[str]]:
    """The trials this machine can run, and the names of those of the real engine where vLLM is not installed.

    Raises:
        MissingExtraError: none is left, or they were asked for by name.
    """
    wanting = [one for one in trials if on_vllm(one)]
    if not wanting or importlib.util.find_spec("vllm") is not None:
        return list(trials), []
    if named or len(wanting) == len(trials):
        need_extra("vllm", f"the fault {wanting[0].name}")
    return [one for one in trials if one not in wanting], [one.name for one in wanting]


def _run(trials: Sequence[Trial], jobs: int, keep: Path | None) -> list[Outcome]:
    """Every outcome, in the order of the trials."""
    done: dict[Trial, Outcome] = {}
    try:
        with _progress(len(trials)) as say:
            for outcome in outcomes(trials, jobs, keep):
                done[outcome.trial] = outcome
                say(outcome)
    except KeyboardInterrupt:
        typer.echo(selftest_text.interrupted(list(done.values()), len(trials)), err=True)
        raise
    return [done[trial] for trial in trials]


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[Outcome], None]]:
    """A line that counts, on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda outcome: None
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("selftest", total=total)

        def say(outcome: Outcome) -> None:
            if not outcome.result.good:
                console.print(f"{outcome.result}: {outcome.trial.name}", markup=False, highlight=False)
            progress.update(task, advance=1, description=outcome.trial.name[:40])

        yield say


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--keep {folder}: cannot be made: {error.strerror or error}") from error
