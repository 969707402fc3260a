"""The recorder of one process of a run: opens stages, takes their rows, seals steps.

Tracing changes nothing: the recorder reads tensors, never writes them, draws no random number, and when it cannot keep
up (a full disk, a field it cannot read) it counts what it dropped, says so in the trace, and lets training go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from numpy.typing import NDArray

from lineage import locks
from lineage.batch import FieldColumn
from lineage.buffers import record_batch
from lineage.compact import compact
from lineage.contents import Contents
from lineage.elements import Elements
from lineage.errors import CheckError, RecorderError, UserError, ViolationError
from lineage.links import link
from lineage.parts import PARTS, parts_folder
from lineage.row import FinishedRow, Row, joined_columns, joined_keys, joined_rows
from lineage.run import RunInfo
from lineage.scopes import NULL_STAGE, StageScopes
from lineage.segments import trace_files
from lineage.stage import NullStage, Stage
from lineage.state import STATE_SUFFIX, StateFile
from lineage.writer import PartWriter

log = logging.getLogger("lineage")

_START_SECONDS = 10.0  # starts and compactions in one folder wait for each other
_WHY_KEPT = 20  # reasons for dropped rows kept in the trace

# called with the rows of a step, None where some of them were lost, and its number
OnStepSealed = Callable[[pa.RecordBatch | None, int], None]


class Recorder(StageScopes):
    """Writes the trace of one process.

    Args:
        folder: run folder; parts go to ``folder/parts``, the trace to ``folder/trace.parquet``.
        info: what the file says of the run.
        process: name of this process (``driver``, ``actor:0``).
        rank: global rank, for a ranked process.
        coord: position in each parallel dimension, for a ranked process.
        every: trace one step of so many, the first one always.
        keep_steps: keep the last so many traced steps while running, and never more than twice as many and the one
            being written; None keeps all.
        reuse: compute the statistics of equal contents of a step once.
        on_step_sealed: called when a step is on disk, with its rows; a :class:`ViolationError` or :class:`CheckError`
            it raises comes out of :meth:`seal` (or of the verb that sealed), any other exception is logged, once. One
            that has a method ``starts`` is given :meth:`is_alone` by it, first of all.

    Raises:
        RecorderError: the folder cannot be written. A recorder that cannot start stops the run.
    """

    def __init__(
        self,
        folder: Path,
        info: RunInfo,
        *,
        process: str = "driver",
        rank: int | None = None,
        coord: Mapping[str, int] | None = None,
        every: int = 1,
        keep_steps: int | None = None,
        reuse: bool = True,
        on_step_sealed: OnStepSealed | None = None,
    ) -> None:
        super().__init__(every)
        if keep_steps is not None and keep_steps < 1:
            raise RecorderError(f"keep_steps={keep_steps}: keep at least one step, or None for all")
        self.folder = Path(folder)
        self._refuse_a_trace()
        self.info = info
        self.elements = Elements()
        self._constants: dict[str, Any] = {"run_id": info.run_id, "process": process, "rank": rank}
        self._coord = dict(coord) if coord else None
        self._reuse = reuse
        self._seq = 0
        self._open_stages: list[Stage] = []
        self.now = time.time_ns
        self._finished: list[FinishedRow] = []
        self._contents = Contents(reuse)
        self._cleared: list[str] = []
        self._closed = False
        self._on_step_sealed = on_step_sealed
        try:
            parts = self.folder / PARTS
            with locks.hold(parts, _START_SECONDS) as alone:
                if not alone:
                    raise RecorderError(f"{self.folder} is being compacted: record each run into a folder of its own")
                self._refuse_a_trace()
                self._state = StateFile(parts, process, info.run_id)
                self._writer = PartWriter(parts, process, keep_steps)
                info.write(parts)
            # Arrow's first conversion imports pandas: a second that would fall on the first step
            record_batch([], self._contents, {**self._constants, "global_steps": 0})
        except OSError as error:
            raise RecorderError(
                f"cannot write a trace to {self.folder}: {error.strerror or error}; "
                "choose a folder that can be written, or set trace.enabled=false"
            ) from error

        if (starts := getattr(on_step_sealed, "starts", None)) is not None:
            starts(self.is_alone)

    def is_alone(self) -> bool:
        """Whether the rows of this process are all of the run's, as far as can be seen now: it has no rank, is called
        ``driver``, and nobody else has recorded into the folder.
        """
        if self._constants["rank"] is not None or self._constants["process"] != "driver":
            return False
        return len(list((self.folder / PARTS).glob(f"*{STATE_SUFFIX}"))) <= 1

    # -- the verbs of a run ---------------------------------------------------------------------------------------

    def step(self, global_steps: int) -> None:
        """Name the step that begins. Steps count from 1; 0 is what happens before the first."""
        if self._pending:
            self.seal()
        self.global_steps = int(global_steps)
        self._state.begin(self.global_steps, self.tracing)

    def make_stage(
        self, name: str, producer: str | None, consumer: str | None, context: dict[str, Any], parent: Stage | None
    ) -> Stage:
        """A new stage of the open step."""
        return Stage(self, name, producer, consumer, context)

    def seal(self) -> None:
        """End the step: its rows go to disk as one batch.

        Raises:
            ViolationError: ``on_step_sealed`` says that the step broke a contract.
            CheckError: it says that the step could not be checked.
        """
        self._seal(torn=False)

    def _seal(self, torn: bool) -> None:
        stages, self._open_stages = self._open_stages, []
        for stage in stages:
            stage.close()  # a late writer's rows, and stages still open across the step
        self.elements.forget(self._cleared)
        self._cleared = []
        rows, contents = self._finished, self._contents
        self._finished, self._contents = [], Contents(self._reuse)
        state = self._state.state
        step, state["open_step"] = self.global_steps, None
        batch = None
        if rows:
            try:
                rows.sort(key=lambda row: row.seq)
                link(rows, self._constants["process"])
                contents.evaluate()
                batch = self._batch(rows, contents, step)
                self._writer.write(batch, step)
            except Exception as error:
                self.drop(len(rows), f"{type(error).__name__}: {error}")
            else:
                self._state.sealed(step)
        self._state.removed(self._writer.expired)
        self._state.write()
        self._writer.remove_expired()  # after the state has said so: a reader then knows what it misses
        lost = step in state["dropped"]["steps"]
        if (batch is not None or lost) and not torn:
            self._tell(None if lost else batch, step)

    def _tell(self, batch: pa.RecordBatch | None, step: int) -> None:
        if self._on_step_sealed is None:
            return
        try:
            self._on_step_sealed(batch, step)
        except (ViolationError, CheckError):
            raise
        except Exception:
            log.exception("lineage: on_step_sealed failed at step %d and is not called again", step)
            self._on_step_sealed = None

    def close(self, error: BaseException | str | None = None) -> Path | None:
        """Seal what is open and compact the parts to ``trace.parquet``.

        Args:
            error: what ended the run, or its text from another process, if it did not end in order. The step it was in
                is then torn. A run that a violation stopped did end in order: its last step is sealed.

        Returns:
            The trace, or None where only the parts could be kept.

        Raises:
            ViolationError, CheckError: as :meth:`seal`, of what was not yet sealed; the trace is closed by then.
        """
        return self.end(reason_of(error), stopped=isinstance(error, (ViolationError, CheckError)))

    def end(self, why: str | None, stopped: bool = False) -> Path | None:
        """:meth:`close` by the text of the error that ended the run, None where it ended in order.

        Args:
            why: the error.
            stopped: it came from ``on_step_sealed``.
        """
        if self._closed:
            return None
        self._closed = True
        state = self._state.state
        torn = why is not None and (state["open_step"] is not None or self._pending)
        if torn:
            state["torn"].append(self.global_steps)
        verdict = None
        if self._pending:
            try:
                self._seal(torn)
            except (ViolationError, CheckError) as error:
                verdict = error
        state["open_step"] = None
        state["closed"] = why is None or (stopped and not torn)
        if why is not None:
            state["error"] = why
        trace = self._finish()
        if verdict is not None:
            raise verdict
        return trace

    def _finish(self) -> Path | None:
        try:
            self._writer.seal()
            self._state.close()
            # nothing recorded leaves nothing to compact
            recorded = parts_folder(self.folder / PARTS) is not None
            return compact(self.folder, closing=self._constants["process"]) if recorded else None
        except UserError:  # another process still writes: the last one to close compacts
            return None
        except (OSError, pa.ArrowException) as failure:
            log.error("lineage: the trace stays in parts under %s: %s", self.folder / PARTS, failure)
            return None

    # -- what stages and adapters call ----------------------------------------------------------------------------

    def keep(self, stage: Stage) -> None:
        """A stage has rows: they go to the step that is open when it is sealed, also those of a late writer."""
        self._open_stages.append(stage)

    def _refuse_a_trace(self) -> None:
        if trace_files(self.folder):
            raise RecorderError(f"{self.folder} already holds a trace: record each run into a folder of its own")

    def _batch(self, rows: list[FinishedRow], contents: Contents, step: int) -> pa.RecordBatch:
        """The step as one batch; a row that Arrow refuses is lost alone."""
        constants = {**self._constants, "global_steps": step}
        try:
            return record_batch(rows, contents, constants)
        except Exception:
            kept = []
            for row in rows:
                try:
                    record_batch([row], contents, constants)
                except Exception as error:
                    where = f"{row.scalars['stage']}.{row.scalars['op']}.{row.scalars['field']}"
                    self.drop(1, f"{where}: {type(error).__name__}: {error}")
                else:
                    kept.append(row)
            return record_batch(kept, contents, constants)

    def forget(self, keys: Sequence[str]) -> None:
        """Cleared keys: their tags go when the step is sealed, so that a late writer's rows still carry them."""
        self._cleared.extend(keys)

    def reserve(self, count: int) -> int:
        """Take ``count`` event numbers for rows that will be made later; the first of them."""
        first = self._seq + 1
        self._seq += count
        return first

    def new_row(self, scalars: dict[str, Any], item: FieldColumn | None) -> Row:
        """Start a row: number it, stamp it, and describe its container."""
        self._seq += 1
        scalars["time_ns"] = self.now()
        scalars.setdefault("coord", self._coord)
        if item is not None:
            scalars.setdefault("span", item.span)
            scalars.update(
                layout=item.layout,
                dtype=item.dtype,
                device=item.device,
                shape=item.shape,
                nbytes=item.nbytes,
                requires_grad=item.requires_grad,
            )
        return Row(self._seq, scalars)

    def finish(self, row: Row) -> None:
        """Take a row whose stage has ended."""
        try:
            self._finished.append(self._finished_row(row))
        except Exception as error:
            where = f"{row.scalars['stage']}.{row.scalars['op']}.{row.scalars['field']}"
            self.drop(1, f"{where}: {type(error).__name__}: {error}")

    def fingerprint_weights(self, arrays: Sequence[NDArray[Any]]) -> int:
        """Take the content of weights at once: no copy of them is kept. Returns its content number."""
        return self._contents.add_weights(arrays)

    def drop(self, rows: int, why: str) -> None:
        """Count rows that were lost, and remember why: the trace will say that it is incomplete."""
        dropped = self._state.state["dropped"]
        if dropped["rows"] == 0:
            log.warning("lineage: dropped rows of step %s (%s); the trace will say so", self.global_steps, why)
        dropped["rows"] += rows
        dropped["steps"].append(self.global_steps)
        why = why[:100]
        if why not in dropped["why"] and len(dropped["why"]) < _WHY_KEPT:
            dropped["why"].append(why)

    def _finished_row(self, row: Row) -> FinishedRow:
        pieces, scalars = row.pieces, row.scalars
        n = sum(piece.n for piece in pieces)
        keys, tags = joined_keys(pieces), None
        columns = joined_columns(pieces)
        if keys is not None and scalars["entity"] in ("trajectory", "prompt"):
            keys, tags = self.elements.columns(keys, queue=scalars.get("partition") is not None)
        rows = joined_rows(pieces)
        if rows is None:
            return FinishedRow(row.seq, scalars, n, keys, columns, tags, row.content)
        if len(pieces) > 1 and scalars.get("shape"):
            scalars["shape"] = (n, *scalars["shape"][1:])
            scalars["nbytes"] = rows.values.nbytes
        first = next(piece.item for piece in pieces if piece.item is not None)
        return FinishedRow(row.seq, scalars, n, keys, columns, tags, self._contents.add(rows), first.width, rows.cuts)

    @property
    def _pending(self) -> bool:
        return bool(self._finished or self._open_stages)


class NullRecorder:
    """The recorder that is off: the same verbs, nothing done, nothing written."""

    enabled = False
    tracing = False
    folder: Path | None = None
    global_steps = 0

    def step(self, global_steps: int) -> None:
        """Do nothing."""

    @contextmanager
    def stage(self, name: str, **options: Any) -> Iterator[NullStage]:
        """A stage whose verbs do nothing."""
        yield NULL_STAGE

    def seal(self) -> None:
        """Do nothing."""

    def close(self, error: BaseException | str | None = None) -> None:
        """Do nothing."""


NULL_RECORDER = NullRecorder()


def reason_of(error: BaseException | str | None) -> str | None:
    """What the trace keeps of the error that ended a run."""
    if error is None:
        return None
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}".removesuffix(": ")
    return text[:300]
