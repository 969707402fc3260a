"""Parts on disk: one Arrow IPC stream per process while the run goes on, sealed by size or age with an atomic rename.

An open Parquet file has no footer and cannot be read; an open Arrow stream can, up to the last whole batch. So a killed
run loses at most the step it was in.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

from lineage.buffers import part_schema

PARTS = "parts"
OPEN_SUFFIX = ".arrow.open"
SEALED_SUFFIX = ".arrow"
STATE_SUFFIX = ".state.json"

_SEAL_BYTES = 64 << 20
_SEAL_SECONDS = 30.0
_LONG_STEP_SECONDS = 2.0
_STATE_BYTES = 4096


class PartWriter:
    """Writes one record batch a step.

    Args:
        folder: the parts folder, made if needed.
        process: name of this process; part of the file names.
        keep_steps: keep only the parts of about the last so many steps; None keeps all.
    """

    def __init__(self, folder: Path, process: str, keep_steps: int | None = None) -> None:
        self._folder = folder
        self._stem = process.replace(":", "-")
        self._keep_steps = keep_steps
        self._number = 0
        self._stream: pa.ipc.RecordBatchStreamWriter | None = None
        self._sink: pa.NativeFile | None = None
        self._opened = 0.0
        self._steps = 0
        self._sealed: list[tuple[Path, int]] = []
        self.gone_through: int | None = None  # the last step whose part was removed
        folder.mkdir(parents=True, exist_ok=True)
        while any(folder.glob(f"{self._stem}-{self._number:05d}.*")):
            self._number += 1  # an earlier process of the same name, e.g. a restarted worker
        self._open()

    def write(self, batch: pa.RecordBatch, global_steps: int) -> None:
        """Append one batch and hand it to the operating system.

        Raises:
            OSError: the disk refused it. The part is closed as it is and the next write starts another.
        """
        try:
            if self._stream is None or self._sink is None:
                self._open()
            assert self._stream is not None
            assert self._sink is not None
            self._stream.write_batch(batch)
            self._sink.flush()
        except (OSError, pa.ArrowException):
            self._abandon()
            raise
        self._steps += 1
        full = self._sink.tell() >= _SEAL_BYTES or time.monotonic() - self._opened >= _SEAL_SECONDS
        if full or (self._keep_steps is not None and self._steps >= self._keep_steps):
            self.seal(global_steps)

    def seal(self, global_steps: int = 0) -> None:
        """Close the open part and give it its sealed name."""
        if self._stream is None or self._sink is None:
            return
        path, sealed = self._path(OPEN_SUFFIX), self._path(SEALED_SUFFIX)
        try:
            self._stream.close()
            self._sink.close()
            if self._steps:
                os.replace(path, sealed)
        except (OSError, pa.ArrowException):
            self._abandon()  # its batches are readable as they are
            raise
        self._stream = self._sink = None
        if self._steps == 0:
            path.unlink(missing_ok=True)
            return
        self._sealed.append((sealed, global_steps))
        self._number += 1
        if self._keep_steps is not None:
            while self._sealed and self._sealed[0][1] <= global_steps - self._keep_steps:
                old, self.gone_through = self._sealed.pop(0)
                old.unlink(missing_ok=True)

    def _open(self) -> None:
        self._sink = pa.output_stream(str(self._path(OPEN_SUFFIX)), compression=None, buffer_size=1 << 20)
        # compressing costs milliseconds a batch: nothing to a step of seconds, a part in a hundred of a short one
        long_steps = self._steps > 0 and (time.monotonic() - self._opened) / self._steps > _LONG_STEP_SECONDS
        options = pa.ipc.IpcWriteOptions(compression="lz4" if long_steps else None)
        self._stream = pa.ipc.new_stream(self._sink, part_schema(), options=options)
        self._opened = time.monotonic()
        self._steps = 0

    def _abandon(self) -> None:
        """Leave a part that could not be written: its whole batches stay readable."""
        sink, self._stream, self._sink = self._sink, None, None
        if sink is not None:
            with contextlib.suppress(OSError, pa.ArrowException):
                sink.close()
        self._number += 1

    def _path(self, suffix: str) -> Path:
        return self._folder / f"{self._stem}-{self._number:05d}{suffix}"


class StateFile:
    """What the process says of its own trace: steps sealed, the step it is in, what it dropped.

    The file has a fixed size from the start and is overwritten in place, so that it can still be written when the disk
    is full.
    """

    def __init__(self, folder: Path, process: str) -> None:
        self.state: dict[str, Any] = {
            "process": process,
            "pid": os.getpid(),
            "closed": False,
            "open_step": None,
            "steps": [],
            "torn": [],
            "dropped": {"rows": 0, "steps": [], "why": []},
        }
        path = folder / f"{process.replace(':', '-')}{STATE_SUFFIX}"
        if path.exists():
            self._carry_over(path)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self.write()

    def write(self) -> None:
        """Write the state over the old one."""
        dropped = {**self.state["dropped"], "steps": _ranges(self.state["dropped"]["steps"])}
        text = json.dumps({**self.state, "steps": _ranges(self.state["steps"]), "dropped": dropped}).encode()
        with contextlib.suppress(OSError):  # a disk that refuses even this: the run then counts as torn
            os.pwrite(self._file, text.ljust(_STATE_BYTES), 0)
            os.ftruncate(self._file, max(len(text), _STATE_BYTES))

    def close(self) -> None:
        """Write once more and close the file."""
        self.write()
        os.close(self._file)

    def _carry_over(self, path: Path) -> None:
        """An earlier process of the same name, e.g. a worker that was restarted: the step it was in is torn."""
        try:
            before = read_state(path)
        except (ValueError, KeyError, TypeError):
            self.state["dropped"]["why"].append(f"the state of an earlier {self.state['process']} is not readable")
            return
        self.state["steps"], self.state["dropped"] = before["steps"], before["dropped"]
        self.state["torn"] = before["torn"] + [step for step in [before["open_step"]] if step is not None]


def read_state(path: Path) -> dict[str, Any]:
    """State of one process; steps as lists again.

    Raises:
        ValueError: the file is not a state.
    """
    state: dict[str, Any] = json.loads(path.read_text())
    state["steps"] = _listed(state["steps"])
    state["dropped"]["steps"] = _listed(state["dropped"]["steps"])
    return state


def _ranges(steps: list[int]) -> list[list[int]]:
    """``[1, 2, 3, 7]`` as ``[[1, 3, 1], [7, 7, 1]]``, first, last and stride: small however long the run."""
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and ranges[-1][0] == ranges[-1][1] and step > ranges[-1][1]:
            ranges[-1][1:] = [step, step - ranges[-1][1]]
        elif ranges and step - ranges[-1][1] == ranges[-1][2]:
            ranges[-1][1] = step
        else:
            ranges.append([step, step, 1])
    return ranges


def _listed(ranges: list[list[int]]) -> list[int]:
    return [step for first, last, stride in ranges for step in range(first, last + 1, stride)]
