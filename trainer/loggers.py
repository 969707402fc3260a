"""Where metrics go: the console (rich on a terminal, plain lines in a pipe) and a JSONL file in the run folder."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

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


class MetricLogger(Protocol):
    """One place metrics go to."""

    def begin(self, total: int) -> None:
        """Learn how many steps the run has."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take one step's metrics."""

    def close(self) -> None:
        """Finish."""


class ConsoleLogger:
    """One line a step, over a progress bar when the output is a terminal.

    Args:
        console: where to print; stdout by default.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._total = 0
        self._progress: Progress | None = None

    def begin(self, total: int) -> None:
        """Draw the bar of a run of ``total`` steps."""
        self._total = total
        if self.console.is_terminal:
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._progress = Progress(*columns, console=self.console, transient=True)
            self._task = self._progress.add_task("training", total=total)
            self._progress.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Print the step's line."""
        shown = [f"{word} {metrics[name]:{form}}" for name, (word, form) in _SHOWN.items() if name in metrics]
        place = f"{step:>{len(str(self._total))}}/{self._total}" if self._total else str(step)
        self.console.print(f"step {place}  {'  '.join(shown)}".rstrip(), markup=False)
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def close(self) -> None:
        """Take the progress bar away."""
        if self._progress is not None:
            self._progress.stop()


class JsonlLogger:
    """One JSON object a step, written through at once: ``{"step": 1, "critic/score/mean": 0.1, ...}``.

    A number JSON lacks (NaN, infinity) is written as null. A disk that refuses a line ends the file, not the training.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def begin(self, total: int) -> None:
        """Nothing to prepare."""

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

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # what is still buffered meets the same full disk
            self._file.close()


class Tracking:
    """All loggers of a run (verl ``Tracking``); a context manager.

    Args:
        names: ``trainer.logger``.
        folder: run folder.
        console: where the console logger prints.
    """

    def __init__(self, names: Sequence[str], folder: Path, console: Console | None = None) -> None:
        self.history: list[tuple[int, dict[str, float]]] = []
        self._loggers: list[MetricLogger] = []
        if "console" in names:
            self._loggers.append(ConsoleLogger(console))
        if "jsonl" in names:
            self._loggers.append(JsonlLogger(folder / METRICS_FILE))

    def begin(self, total: int) -> None:
        """Tell every logger how many steps the run has."""
        for logger in self._loggers:
            logger.begin(total)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Hand one step's metrics to every logger, and keep them for the summary."""
        self.history.append((step, dict(metrics)))
        for logger in self._loggers:
            logger.log(metrics, step)

    def values(self, name: str) -> list[float]:
        """One metric over the steps that logged it."""
        return [metrics[name] for _, metrics in self.history if name in metrics]

    def close(self) -> None:
        """Finish every logger."""
        for logger in self._loggers:
            logger.close()

    def __enter__(self) -> Tracking:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _number(value: float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
