"""One trial of ``lineage selftest``: a run is recorded, with a fault or clean, and the whole catalogue judges it.

Trials run in worker processes, each of which imports the trainer once; a dozen are judged at once (``together``), and
one that is not as it should be is judged again by itself. What comes back is small: no report, no trace.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from lineage.cli.together import TOGETHER, Judgement, Place, Seen, judged, judged_together, judgement
from lineage.errors import UserError, first_line

if TYPE_CHECKING:
    from lineage.checks.report import Report
    from lineage.trainer.faults.registry import Fault

_TIME_LIMIT = 300  # seconds of one trial; it takes three
_CORRECTION, _ACTOR, _ROLLOUT = "algorithm.rollout_correction", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
# Warnings that are true of a clean run, by code: the settings, or settings with a value, any of which brings them.
_TRUE_WARNINGS: Mapping[str, tuple[str, ...]] = {
    # a rejection as verl makes it rewrites response_mask and divides by the tokens of loss_mask as before
    "MSK002": (f"{_CORRECTION}.rollout_rs",),
    # and may leave no token of a mini-batch
    "MSK005": (f"{_CORRECTION}.rollout_rs",),
    # a policy thrown that far has perplexities past every number
    "VAL001": (f"{_ACTOR}.optim.lr=0.1",),
    # the tiny model of the tools answers the sessions of a group alike, as every model does where little is left to
    # chance; one that was never trained is right at nothing
    "REW004": (
        "experiment=tools",
        "data.train_files=builtin:add",
        f"{_ROLLOUT}.do_sample=false",
        f"{_ROLLOUT}.top_k=1",
        f"{_ROLLOUT}.temperature=0.01",
        f"{_ACTOR}.optim.lr=0.1",
    ),
}


class Kind(StrEnum):
    """What a trial tries."""

    FAULT = "fault"
    CLEAN = "clean"
    LAW = "law"


class Result(StrEnum):
    """What became of a trial; all but the first three are what ``lineage selftest`` exits with 1 for."""

    CAUGHT = "caught"
    CLEAN = "clean"
    HOLDS = "holds"
    MISSED = "missed"
    WRONG_CODE = "wrong code"
    WRONG_STAGE = "wrong stage"
    FALSE_ALARM = "false alarm"
    BROKEN = "broken"
    CRASHED = "crashed"

    @property
    def good(self) -> bool:
        """It is as it should be."""
        return self in (Result.CAUGHT, Result.CLEAN, Result.HOLDS)


@dataclass(frozen=True)
class Trial:
    """What is to be tried.

    Attributes:
        kind: which of the three.
        name: of the fault, the clean configuration or the law.
        overrides: of a clean configuration, beyond the lab's.
        resume_after: a clean run stops after this step and goes on as another run; 0 never.
    """

    kind: Kind
    name: str
    overrides: tuple[str, ...] = ()
    resume_after: int = 0


@dataclass(frozen=True)
class Outcome:
    """What a trial left.

    Attributes:
        trial: what was tried.
        result: what became of it.
        wanted: what a fault must be blamed on.
        blamed: the headline's place; where nothing failed, that of the warning that was wanted, of a clean run that of
            its first warning.
        headline: what ``lineage check`` prints of it, a line each.
        seen: what every code said; of a run in two halves, of the first that fails, else that warns, or the
            second.
        error: why it crashed, or how a law is broken, in a line.
        record_seconds, check_seconds: time it took.
    """

    trial: Trial
    result: Result
    wanted: Place | None = None
    blamed: Place | None = None
    headline: tuple[str, ...] = ()
    seen: Mapping[str, Seen] = field(default_factory=dict)
    error: str = ""
    record_seconds: float = 0.0
    check_seconds: float = 0.0

    @property
    def failed(self) -> tuple[str, ...]:
        """The codes that failed."""
        return tuple(code for code, one in self.seen.items() if one.errors)


def said(one: Outcome) -> dict[str, Any]:
    """An outcome for programs: what it holds, and what follows from that."""
    return asdict(one) | {"good": one.result.good, "failed": list(one.failed)}


def outcomes(trials: Sequence[Trial], jobs: int, keep: Path | None = None) -> Iterator[Outcome]:
    """Run trials in worker processes, in the order they end; the workers end with the iteration.

    Args:
        trials: what to try.
        jobs: processes.
        keep: folder that keeps the traces; None keeps none.
    """
    with TemporaryDirectory() as temporary:
        folder = keep or Path(temporary)
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(min(jobs, len(trials)) or 1, mp_context=context, initializer=_begin)
        try:
            with _uninterrupted():  # workers start here, and inherit it: Ctrl-C is their parent's to answer
                running = [
                    pool.submit(_attempt_in_time, some, folder, keep is not None) for some in _some(trials, jobs)
                ]
            for done in as_completed(running):
                yield from done.result()
        except BrokenProcessPool as error:
            raise UserError("a worker died, killed or out of memory: try fewer, with --jobs 1") from error
        except BaseException:  # an interrupted selftest waits for nobody
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()
            raise
        finally:
            pool.shutdown()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _begin() -> None:
    """Of a worker: sessions that fail on purpose are no news, and each keeps to its own core."""
    logging.disable(logging.WARNING)
    import torch

    torch.set_num_threads(1)


def _some(trials: Sequence[Trial], jobs: int) -> Iterator[list[Trial]]:
    """Portions for the workers: runs that can be judged together, and the others one by one."""
    apart = [one for one in trials if one.kind is Kind.LAW or one.resume_after or on_ray(one)]
    plain = [one for one in trials if one not in apart]
    size = max(1, min(TOGETHER, -(-len(plain) // jobs)))
    yield from ([one] for one in apart)
    yield from (plain[start : start + size] for start in range(0, len(plain), size))


def on_ray(trial: Trial) -> bool:
    """Whether a run starts processes of its own: it takes a minute, and is judged by itself."""
    return "mode=ray" in _overrides(trial)


def on_vllm(trial: Trial) -> bool:
    """Whether a run generates with vLLM, which not every machine has."""
    return "rollout.name=vllm" in _overrides(trial)


def _overrides(trial: Trial) -> tuple[str, ...]:
    fault = _fault(trial)
    return trial.overrides if fault is None else fault.overrides


def _attempt_in_time(trials: Sequence[Trial], folder: Path, keep: bool) -> list[Outcome]:
    """Some trials in a worker: a fault that lets a run wait for ever is a crash."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not done after {_TIME_LIMIT} s")

    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, late)
    try:
        return [attempt(trials[0], folder, keep)] if len(trials) == 1 else attempt_together(trials, folder, keep)
    finally:
        _wait_no_longer()


def _wait_no_longer(seconds: int = 0) -> None:
    if hasattr(signal, "SIGALRM"):
        signal.alarm(seconds)


def attempt_together(trials: Sequence[Trial], folder: Path, keep: bool = False) -> list[Outcome]:
    """Run several trials in this process and judge them at once."""
    done: dict[Trial, Outcome] = {}
    seconds: dict[Trial, float] = {}
    with TemporaryDirectory(dir=folder) as name:
        for trial in trials:
            began = time.perf_counter()
            try:
                _wait_no_longer(_TIME_LIMIT)
                _recorded(trial, _fault(trial), Path(name))
            except Exception as error:
                done[trial] = _crashed(trial, error, began)
            seconds[trial] = time.perf_counter() - began
        began = time.perf_counter()
        _wait_no_longer(_TIME_LIMIT)
        try:
            found = judged_together(Path(name), [_stem(trial) for trial in trials if trial not in done])
        except Exception:  # they cannot stand in one trace, or not in time: each says by itself what is wrong
            found = {}
        each = (time.perf_counter() - began) / len(trials)
        for trial in trials:
            if _stem(trial) in found:
                done[trial] = _unlike_its_twin(_outcome(trial, found[_stem(trial)], seconds[trial], each), Path(name))
            if trial not in done or not (done[trial].result.good or done[trial].error):
                done[trial] = _alone(trial, done.get(trial), Path(name))
        if keep:
            for file in Path(name).glob("*.parquet"):
                file.replace(folder / file.name)
    return [done[trial] for trial in trials]


def _alone(trial: Trial, together: Outcome | None, folder: Path) -> Outcome:
    """A trial by itself, for its headline; what was said of a clean run beside others is a false alarm all the same."""
    done = attempt(trial, folder, keep=True)
    if together is None or trial.kind is not Kind.CLEAN or not done.result.good:
        return done
    beside = f"only beside other runs: {together.blamed}"
    return replace(done, result=together.result, blamed=together.blamed, error=beside)


def attempt(trial: Trial, folder: Path, keep: bool = False) -> Outcome:
    """Run one trial in this process; a run that raises is an outcome too."""
    began = time.perf_counter()
    paths: tuple[Path, ...] = ()
    try:
        _wait_no_longer(_TIME_LIMIT)
        if trial.kind is Kind.LAW:
            from lineage.trainer.faults.laws import LAWS

            broken = LAWS[trial.name].broken()
            result = Result.BROKEN if broken else Result.HOLDS
            return Outcome(trial, result, error=broken, record_seconds=time.perf_counter() - began)
        paths = _recorded(trial, _fault(trial), folder)
        recorded = time.perf_counter()
        found = [(one, judgement(one)) for one in map(judged, paths)]
        if _fault_is_a_loss(trial):
            found = [(one, replace(said, blamed=_first_lack(one.path))) for one, said in found]
    except Exception as error:
        return _crashed(trial, error, began)
    finally:
        _wait_no_longer()
        for path in () if keep else paths:
            path.unlink(missing_ok=True)
    fails = [pair for pair in found if not pair[1].clean]
    warns = [pair for pair in found if not _clean(trial, pair[1])]
    report, said_of_it = (fails or warns or found[-1:])[0]
    done = _outcome(trial, said_of_it, recorded - began, time.perf_counter() - recorded)
    return _unlike_its_twin(replace(done, headline=_headline(report, done.blamed)), folder)


def _unlike_its_twin(done: Outcome, folder: Path) -> Outcome:
    """A fault that only warnings tell of is caught by them if the same run without it is silent of this code."""
    fault = _fault(done.trial)
    if fault is None or done.result is not Result.CAUGHT or done.failed or _fault_is_a_loss(done.trial):
        return done
    from lineage.trainer.faults.lab import record

    began = time.perf_counter()
    twin = folder / f"{_stem(done.trial)}-twin.parquet"
    try:
        _wait_no_longer(_TIME_LIMIT)
        report = judged(record(twin, replace(fault, seams=None, edit=None)), [fault.code])
    except Exception as error:
        return _crashed(done.trial, error, began)
    finally:
        _wait_no_longer()
        twin.unlink(missing_ok=True)
    if not report.verdict(fault.code).violations:
        return done
    return replace(done, result=Result.MISSED, error=f"{fault.code} says as much of the run without this fault")


def _outcome(trial: Trial, found: Judgement, record_seconds: float, check_seconds: float) -> Outcome:
    wanted = _wanted(trial)
    warned = _alarms(trial, found) if wanted is None else [one for one in found.warned if one == wanted]
    blamed = found.blamed or next(iter(warned), None)  # of a code that only warns there is no headline
    return Outcome(
        trial,
        _result(wanted, blamed, _clean(trial, found)),
        wanted,
        blamed,
        seen=found.seen,
        record_seconds=record_seconds,
        check_seconds=check_seconds,
    )


def _clean(trial: Trial, found: Judgement) -> bool:
    """What a clean run must be: complete, nothing fails and nothing warns."""
    return found.clean and not _alarms(trial, found)


def _alarms(trial: Trial, found: Judgement) -> list[Place]:
    """Warnings that are not true of the configuration."""
    typed = {line.lstrip("+") for line in trial.overrides}
    typed |= {line.partition("=")[0] for line in typed}
    return [one for one in found.warned if typed.isdisjoint(_TRUE_WARNINGS.get(one.code, ()))]


def _crashed(trial: Trial, error: Exception, began: float) -> Outcome:
    seconds = time.perf_counter() - began
    return Outcome(trial, Result.CRASHED, _wanted(trial), error=_said(error), record_seconds=seconds)


def _wanted(trial: Trial) -> Place | None:
    fault = _fault(trial)
    return None if fault is None else Place(fault.code, fault.stage, fault.shows or fault.step)


def _fault(trial: Trial) -> Fault | None:
    from lineage.trainer.faults.registry import find_fault

    return find_fault(trial.name) if trial.kind is Kind.FAULT else None


def _recorded(trial: Trial, fault: Fault | None, folder: Path) -> tuple[Path, ...]:
    from lineage.trainer.faults.lab import record, record_halves

    stem = _stem(trial)
    if not trial.resume_after:
        return (record(folder / f"{stem}.parquet", fault, trial.overrides),)
    halves = folder / f"{stem}-1.parquet", folder / f"{stem}-2.parquet"
    return record_halves(*halves, trial.resume_after, trial.overrides)


def _fault_is_a_loss(trial: Trial) -> bool:
    """Whether no contract is to be broken, but a part of the trace to be missing, and named."""
    from lineage.trainer.faults.registry import INCOMPLETE

    return (fault := _fault(trial)) is not None and fault.code == INCOMPLETE


def _first_lack(path: Path | str) -> Place | None:
    """The first event that a torn step lacks."""
    from lineage.traces import open_trace
    from lineage.traces.torn import lacks
    from lineage.trainer.faults.registry import INCOMPLETE

    with open_trace(path, views=False) as trace:
        for lack in lacks(trace):
            if lack.first is not None:
                return Place(INCOMPLETE, lack.first[0], lack.step)
    return None


def _stem(trial: Trial) -> str:
    """The name of a trial's trace, which is its run's."""
    return f"{trial.kind}-{trial.name}".replace(" ", "-")


def _headline(report: Report, blamed: Place | None) -> tuple[str, ...]:
    from lineage.checks.formats.text import failure_lines

    if blamed is None or blamed.code not in {one.code for one in report.verdicts}:
        return (report.state, *report.notes) if report.state else ()
    return tuple(failure_lines(report, report.verdict(blamed.code)))


def _result(wanted: Place | None, blamed: Place | None, clean: bool) -> Result:
    if wanted is None:
        return Result.CLEAN if clean else Result.FALSE_ALARM
    if blamed is None:
        return Result.MISSED
    if blamed == wanted:
        return Result.CAUGHT
    return Result.WRONG_STAGE if blamed.code == wanted.code else Result.WRONG_CODE


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
