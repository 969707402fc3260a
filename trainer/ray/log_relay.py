"""What the processes of a run log, from warnings on, on its way to the process the user looks at."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LogLine:
    """A line of a log: its logger, level and message."""

    name: str
    level: int
    message: str


class LogCollector(logging.Handler):
    """Keeps what this process logs until it is taken; there from the moment it is made."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: list[LogLine] = []
        logging.getLogger().addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self._lines.append(LogLine(record.name, record.levelno, record.getMessage()))

    def take(self) -> list[LogLine]:
        """What was kept since the last time."""
        with self.lock or contextlib.nullcontext():  # a handler's own, held while it takes a line
            lines, self._lines = self._lines, []
        return lines


def log_lines_of(process: str, lines: Sequence[LogLine]) -> None:
    """Log here what another process logged, with its name."""
    for line in lines:
        logging.getLogger(line.name).log(line.level, "%s (%s)", line.message, process)
