"""Where metrics go: the console (rich on a terminal, plain lines in a pipe), a JSONL file, services (``trackers``)."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lineage.hooks import UserError, first_line
from lineage.trainer.tracking.dump import Sample
from lineage.trainer.tracking.trackers import SERVICES, Experiment, MetricLogger, need_modules

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"

# metric -> (word, format) of the console line
_SHOWN = {
    "critic/score/mean": ("score", ".3f"),
    "actor/pg_loss": ("pg_loss", ".4f"),
    "actor/kl_loss": ("kl", ".4f"),
    "actor/entropy": ("entropy", ".3f"),
    "actor/grad_norm": ("grad", ".3f"),
    "response_length/mean": ("length", ".1f"),
    "timing_s/step": ("s", ".2f"),
}


class LoggerError(UserError):
    """A logger that was asked for cannot start."""


class ConsoleLogger:
    """One line a step, over a progress bar when the output is a terminal.

    Args:
        console: where to print; stdout by default.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._total = 0
        self._progress: Progress | None = None

    def begin(self, total: int, done: int = 0) -> None:
        """Draw the bar of a run of ``total`` steps, ``done`` of them by an earlier run."""
        self._total = total
        if self.console.is_terminal:
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._progress = Progress(*columns, console=self.console, transient=True)
            self._task = self._progress.add_task("training", total=total, completed=done)
            self._progress.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Print the step's line."""
        shown = [f"{word} {metrics[name]:{form}}" for name, (word, form) in _SHOWN.items() if name in metrics]
        shown += [f"{name} {value:.3f}" for name, value in metrics.items() if _is_headline(name)]
        place = f"{step:>{len(str(self._total))}}/{self._total}" if self._total else str(step)
        self.console.print(f"step {place}  {'  '.join(shown)}".rstrip(), markup=False)
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def generations(self, samples: Sequence[Sample], step: int) -> None:
        """Print answers of a validation."""
        for sample in samples:
            self.console.print(f"val {step}  {sample.input!r} -> {sample.output!r}  {sample.score:.3f}", markup=False)

    def close(self, failed: bool = False) -> None:
        """Take the progress bar away."""
        if self._progress is not None:
            self._progress.stop()


class JsonlLogger:
    """One JSON object a step, written through at once: ``{"step": 1, "critic/score/mean": 0.1, ...}``.

    A number JSON lacks (NaN, infinity) is written as null. A disk that refuses a line ends the file, not the training.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append the step's line."""
        values = {name: _number(value) for name, value in metrics.items()}
        if self._file.closed:
            return
        try:
            self._file.write(json.dumps({"step": step, **values}) + "\n")
            self._file.flush()
        except OSError as error:
            logger.warning("metrics end before step %d: %s", step, error)
            self.close()

    def close(self, failed: bool = False) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # what is still buffered meets the same full disk
            self._file.close()


@dataclass
class Tracking:
    """All loggers of a run (verl ``Tracking``); a context manager.

    A logger that cannot start stops the run. One that fails later is left out from then on, with a warning: the metrics
    of a run are not worth the run.

    Args:
        names: ``trainer.logger``.
        experiment: the run folder, and what services file the run under.
        console: where the console logger prints.

    Raises:
        MissingExtraError: a service's package is not installed.
        LoggerError: a service does not start.
    """

    names: Sequence[str]
    experiment: Experiment
    console: Console | None = None
    history: list[tuple[int, dict[str, float]]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        need_modules(self.names)
        self._console = ConsoleLogger(self.console) if "console" in self.names else None
        self._loggers: dict[str, MetricLogger] = {}
        try:
            for name in dict.fromkeys(self.names):
                self._loggers[name] = self._start(name)
        except BaseException:
            self.close(failed=True)
            raise

    def _start(self, name: str) -> MetricLogger:
        if self._console is not None and name == "console":
            return self._console
        if name == "jsonl":
            return JsonlLogger(self.experiment.folder / METRICS_FILE)
        try:
            return SERVICES[name](self.experiment)
        except Exception as error:
            raise LoggerError(f"trainer.logger={name} does not start: {first_line(error)}") from error

    def begin(self, total: int, done: int = 0) -> None:
        """Say how many steps the run has, and after which it goes on."""
        if self._console is not None:
            self._console.begin(total, done)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Hand one step's metrics to every logger, and keep them for the summary."""
        self.history.append((step, dict(metrics)))
        for name, target in list(self._loggers.items()):
            try:
                target.log(metrics, step)
            except Exception as error:
                logger.warning("trainer.logger=%s ends before step %d: %s", name, step, first_line(error))
                _close(name, self._loggers.pop(name), failed=True)

    def log_generations(self, samples: Sequence[Sample], step: int) -> None:
        """Show answers of a validation on the console."""
        if self._console is not None:
            self._console.generations(samples, step)

    @property
    def steps(self) -> int:
        """Training steps that were logged; a validation before the first is none."""
        return sum("training/global_step" in metrics for _, metrics in self.history)

    def values(self, name: str) -> list[float]:
        """One metric over the steps that logged it."""
        return [metrics[name] for _, metrics in self.history if name in metrics]

    def close(self, failed: bool = False) -> None:
        """Finish every logger; none keeps another from it."""
        loggers, self._loggers = self._loggers, {}
        for name, target in loggers.items():
            _close(name, target, failed)

    def __enter__(self) -> Tracking:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)


def _close(name: str, target: MetricLogger, failed: bool) -> None:
    try:
        target.close(failed)
    except Exception as error:
        logger.warning("trainer.logger=%s did not close: %s", name, first_line(error))


def _is_headline(name: str) -> bool:
    return name.startswith("val-core/") and "/mean@" in name


def _number(value: float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
