"""Parts on disk: one Arrow IPC stream per process while the run goes on, sealed by size or age with an atomic rename.

An open Parquet file has no footer and cannot be read; an open Arrow stream can, up to the last whole batch. So a killed
run loses at most the step it was in.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pyarrow as pa

from lineage.buffers import part_schema
from lineage.parts import OPEN_SUFFIX, SEALED_SUFFIX, number_of, stem_of, steps_of

_SEAL_BYTES = 64 << 20
_SEAL_SECONDS = 30.0
_LONG_STEP_SECONDS = 2.0


class PartWriter:
    """Writes one record batch a step.

    Args:
        folder: the parts folder, made if needed.
        process: name of this process; part of the file names.
        keep_steps: keep the last so many steps; None keeps all. Parts hold at most so many steps and go when those
            after them hold as many: on disk are never more than twice ``keep_steps`` steps and the one being written.
            What was recorded before the first step (step 0) stays.
    """

    def __init__(self, folder: Path, process: str, keep_steps: int | None = None) -> None:
        self._folder = folder
        self._stem = process.replace(":", "-")
        self._keep_steps = keep_steps
        self._number = 0
        self._stream: pa.ipc.RecordBatchStreamWriter | None = None
        self._sink: pa.NativeFile | None = None
        self._opened = 0.0
        self._batches = 0
        self._steps: dict[int, None] = {}  # of the open part, with keep_steps only
        self._kept: list[tuple[Path, dict[int, None]]] = []  # the parts before it that may go one day
        self._expired: list[tuple[Path, dict[int, None]]] = []
        folder.mkdir(parents=True, exist_ok=True)
        # an earlier process of the same name, e.g. a restarted worker, may have left parts
        earlier = [path for path in folder.glob(f"{self._stem}-*{SEALED_SUFFIX}*") if stem_of(path) == self._stem]
        for path in sorted(earlier, key=number_of):
            self._number = number_of(path) + 1
            if keep_steps is not None:
                self._keep(path, dict.fromkeys(steps_of(path)))
        self._open()

    @property
    def expired(self) -> list[int]:
        """Steps whose parts are about to go: tell readers, then call :meth:`remove_expired`."""
        return sorted({step for _, steps in self._expired for step in steps})

    def remove_expired(self) -> None:
        """Remove the parts of the expired steps."""
        for path, _ in self._expired:
            with contextlib.suppress(OSError):
                path.unlink()
        self._expired = []

    def write(self, batch: pa.RecordBatch, global_steps: int) -> None:
        """Append one batch and hand it to the operating system.

        Raises:
            OSError: the disk refused it. The part is closed as it is and the next write starts another.
        """
        if self._keep_steps is not None and global_steps and 0 in self._steps:
            self.seal()  # what was before the first step stays, so it has a part of its own
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
        self._batches += 1
        if self._keep_steps is not None:
            self._steps[global_steps] = None
        full = self._sink.tell() >= _SEAL_BYTES or time.monotonic() - self._opened >= _SEAL_SECONDS
        if full or (self._keep_steps is not None and len(self._steps) >= self._keep_steps):
            self.seal()

    def seal(self) -> None:
        """Close the open part and give it its sealed name."""
        if self._stream is None or self._sink is None:
            return
        path, sealed = self._path(OPEN_SUFFIX), self._path(SEALED_SUFFIX)
        try:
            self._stream.close()
            self._sink.close()
            if self._batches:
                os.replace(path, sealed)
        except (OSError, pa.ArrowException):
            self._abandon()  # its batches are readable as they are
            raise
        self._stream = self._sink = None
        if self._batches == 0:
            path.unlink(missing_ok=True)
            return
        self._number += 1
        self._keep(sealed, self._steps)

    def _keep(self, path: Path, steps: dict[int, None]) -> None:
        """Remember a part that is done, and find those that are older than the last ``keep_steps`` steps."""
        if self._keep_steps is None or set(steps) <= {0}:
            return
        self._kept.append((path, steps))
        while len({step for _, later in self._kept[1:] for step in later}) >= self._keep_steps:
            self._expired.append(self._kept.pop(0))

    def _open(self) -> None:
        self._sink = pa.output_stream(str(self._path(OPEN_SUFFIX)), compression=None, buffer_size=1 << 20)
        # compressing costs milliseconds a batch: nothing to a step of seconds, a part in a hundred of a short one
        long_steps = self._batches > 0 and (time.monotonic() - self._opened) / self._batches > _LONG_STEP_SECONDS
        options = pa.ipc.IpcWriteOptions(compression="lz4" if long_steps else None)
        self._stream = pa.ipc.new_stream(self._sink, part_schema(), options=options)
        self._opened = time.monotonic()
        self._batches = 0
        self._steps = {}

    def _abandon(self) -> None:
        """Leave a part that could not be written: its whole batches stay readable."""
        sink, self._stream, self._sink = self._sink, None, None
        if sink is not None:
            with contextlib.suppress(OSError, pa.ArrowException):
                sink.close()
            self._keep(self._path(OPEN_SUFFIX), self._steps)
        self._number += 1

    def _path(self, suffix: str) -> Path:
        return self._folder / f"{self._stem}-{self._number:05d}{suffix}"
