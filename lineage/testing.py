"""For test suites: record a few lines in a test, then assert on the trace they left.

Enters: whatever the code under test records. Leaves: a trace, and assertions on it. A facade for tests, not a part of
the recorder: it is the one module of this folder that leans on ``lineage.checks``, and nothing of ours imports it.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from lineage.checks.assertions import assert_invariants, assert_violates
from lineage.errors import RecorderError
from lineage.hooks import AnyRecorder, disabled, recording
from lineage.run import TRACE_FILE
from lineage.stage import NullStage, Stage

__all__ = ["Recording", "assert_invariants", "assert_violates", "record"]


class Recording:
    """A block that is recorded, and the trace it left. Made by :func:`record`.

    Args:
        recorder: the active recorder of the block.
        folder: where the trace goes.
    """

    def __init__(self, recorder: AnyRecorder, folder: Path) -> None:
        self._recorder = recorder
        self._folder = folder
        self._ended = False

    @property
    def trace(self) -> Path:
        """The trace, once the block has ended.

        Raises:
            RecorderError: the block has not ended, or nothing was recorded in it.
        """
        if not self._ended:
            raise RecorderError("the recording still runs: assert on it after its with block")
        trace = self._folder / TRACE_FILE
        if not trace.exists():
            raise RecorderError(
                "nothing was recorded: the block opened no stage of the active recorder, or none of what it gave could "
                "be read; see the warnings of the 'lineage' logger"
            )
        return trace

    def step(self, global_steps: int) -> None:
        """Name the step that begins; steps count from 1."""
        self._recorder.step(global_steps)

    def stage(
        self, name: str, *, producer: str | None = None, consumer: str | None = None, **context: Any
    ) -> AbstractContextManager[Stage | NullStage]:
        """Open a stage, as a recorder does."""
        return self._recorder.stage(name, producer=producer, consumer=consumer, **context)

    def seal(self) -> None:
        """End the step."""
        self._recorder.seal()


@contextmanager
def record(folder: str | Path | None = None, **options: Any) -> Iterator[Recording]:
    """Record a ``with`` block; its recorder is the active one there, and the one before is active again afterwards.

    Args:
        folder: where the trace goes, such as ``tmp_path``. None makes a temporary folder that goes when the recording
            does.
        options: as for ``lineage.record``.

    Raises:
        RecorderError: tracing is switched off, so that a test would assert on nothing; or the folder cannot be used.
    """
    if disabled() or not options.get("enabled", True):
        raise RecorderError("tracing is off, so there is nothing to assert on: unset LINEAGE_DISABLED for these tests")
    where = Path(tempfile.mkdtemp(prefix="lineage-test-")) if folder is None else Path(folder)
    made: Recording | None = None
    try:
        with recording(where, **options) as recorder:
            made = Recording(recorder, where)
            if folder is None:
                weakref.finalize(made, shutil.rmtree, where, True)
            yield made
    finally:
        if made is not None:
            made._ended = True
        elif folder is None:
            shutil.rmtree(where, ignore_errors=True)
