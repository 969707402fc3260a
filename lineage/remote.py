"""The recorder in a process of its own, seen from the training process.

Here a record costs a snapshot of the tensors and, once a step, one pickled message. Columns, statistics, Arrow and the
disk are the other process's work (:mod:`lineage.sidecar`), which replays the same calls on a :class:`Recorder`.
"""

from __future__ import annotations

import json
import logging
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from lineage.batch import container_name, frozen_items
from lineage.errors import RecorderError, UsageError
from lineage.freeze import freeze
from lineage.recorder import reason_of
from lineage.row import CONTEXT_NAMES
from lineage.run import RunInfo
from lineage.scopes import StageScopes
from lineage.stage import Columns, Keys, Stage

if TYPE_CHECKING:
    from lineage.recorder import Recorder

log = logging.getLogger("lineage")

Call = tuple[Any, ...]

_OPTIONS = CONTEXT_NAMES | {"keys", "entity", "mask", "columns", "lengths", "left_padded", "fields", "field", "reason"}
_WAITING_BYTES = 32 << 20  # of one message: weights and long batches are sent as they come
_WAITING_MESSAGES = 64  # beyond this the training process waits for the recorder's


class RemoteRecorder(StageScopes):
    """Sends what is recorded to a recorder in another process. Same verbs, same rows as :class:`Recorder`.

    Args:
        folder: run folder.
        info: what the file says of the run.
        every: trace one step of so many, the first one always.
        options: further options of the recorder.

    Raises:
        RecorderError: the recorder could not start.
    """

    def __init__(self, folder: Path, info: RunInfo, *, every: int = 1, **options: Any) -> None:
        super().__init__(every)
        self.folder = Path(folder)
        self.elements = _RemoteElements(self)
        self._calls: list[Call] = []
        self._bytes = 0
        self._stages = 0
        self._closed = False
        self._pipe = _Pipe(pickle.dumps((self.folder, info, {"every": every, **options})))

    def step(self, global_steps: int) -> None:
        """Name the step that begins; the other process is told at once, so that a kill leaves it named."""
        self.global_steps = global_steps
        self.send("step", global_steps)
        self.flush()

    def seal(self) -> None:
        """End the step: what was recorded goes to the other process."""
        self.send("seal")
        self.flush()

    def close(self, error: BaseException | None = None) -> Path | None:
        """Seal what is open and wait until the other process has compacted the trace.

        Args:
            error: what ended the run, if it did not end in order.

        Returns:
            The trace, or None where only the parts could be kept.
        """
        if self._closed:
            return None
        self._closed = True
        self.send("end", reason_of(error))
        self.flush()
        answer = self._pipe.close()
        if answer is None:
            log.error("lineage: the recorder's process is gone; what it wrote stays in parts under %s", self.folder)
            return None
        return None if answer["trace"] is None else Path(answer["trace"])

    def make_stage(
        self, name: str, producer: str | None, consumer: str | None, context: dict[str, Any], parent: Stage | None
    ) -> Stage:
        """A new stage here and its twin there."""
        self._stages += 1
        number = parent.number if isinstance(parent, RemoteStage) else None
        self.send("open", self._stages, number, name, producer, consumer, context)
        return RemoteStage(self, self._stages, name, producer, consumer, context)

    def send(self, *call: Any, nbytes: int = 0) -> None:
        """Add a call to the message of the step."""
        self._calls.append((time.time_ns(), *call))
        self._bytes += nbytes
        if self._bytes > _WAITING_BYTES:
            self.flush()

    def forget(self, keys: Sequence[str]) -> None:
        """Cleared keys: their tags go when the step is sealed."""
        self.send("forget", list(keys))

    def drop(self, rows: int, why: str) -> None:
        """Count rows that were lost."""
        self.send("drop", rows, why)

    def flush(self) -> None:
        """Hand the calls so far to the other process."""
        calls, self._calls, self._bytes = self._calls, [], 0
        message = _pickled(calls)
        if message is None:  # an object of the caller's that cannot be pickled, in attrs or columns: lose it alone
            message = pickle.dumps([call if _pickled(call) is not None else _lost(call) for call in calls])
        self._pipe.put(message)


class RemoteStage(Stage):
    """A stage whose primitive verbs are sent; the others are the ones of :class:`Stage`, in terms of these."""

    def __init__(
        self,
        recorder: RemoteRecorder,
        number: int,
        name: str,
        producer: str | None,
        consumer: str | None,
        context: Mapping[str, Any],
    ) -> None:
        # the verbs overridden below are the only ones that reach into a recorder
        super().__init__(cast("Recorder", recorder), name, producer, consumer, context)
        self.number = number
        self._remote = recorder

    def record(self, op: str, batch: Any, **options: Any) -> None:
        """Send snapshots of a batch's fields. Arguments as for :meth:`Stage.record`."""
        self._check(options)
        try:
            items = frozen_items(batch, options.pop("fields", None))
            if options.get("mask") is not None:
                options["mask"] = freeze(options["mask"])
            options["container"] = options.get("container") or container_name(batch)
        except Exception as error:
            self._remote.drop(1, f"{self.name}.record: {type(error).__name__}: {error}")
            return
        self._send("record", (op, items), options)

    def compare(self, field: str, a: Any, against: str, b: Any, **options: Any) -> None:
        """Send both sides of a comparison. Arguments as for :meth:`Stage.compare`."""
        self._check(options)
        if options.get("mask") is not None:
            options["mask"] = freeze(options["mask"])
        self._send("compare", (field, freeze(a), against, freeze(b)), options)

    def event(self, op: str, field: str, **options: Any) -> None:
        """Send a row without elements. Arguments as for :meth:`Stage.event`."""
        self._check(options)
        self._send("event", (op, field), options)

    def params(self, op: str, named_tensors: Mapping[str, Any], **options: Any) -> None:
        """Send named tensors at once: no copy of them is kept here. Arguments as for :meth:`Stage.params`."""
        self._check(options)
        self._send(
            "params", (op, {name: freeze(tensor, copy=False) for name, tensor in named_tensors.items()}), options
        )
        self._remote.flush()

    def metrics(self, values: Mapping[str, float], **options: Any) -> None:
        """Send metrics by name. Arguments as for :meth:`Stage.metrics`."""
        self._check(options)
        self._send("metrics", (dict(values),), options)

    def close(self) -> None:
        """End the stage there too."""
        self.children.clear()
        self._remote.send("close", self.number)

    def _keys_only(self, op: str, keys: Keys, columns: Columns, options: dict[str, Any]) -> None:
        self._check(options)
        self._send("_keys_only", (op, list(keys), dict(columns), options), {})

    def _send(self, verb: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        snapshot = {name: _copied(value) for name, value in options.items()}
        self._remote.send("verb", self.number, verb, arguments, snapshot)

    def _check(self, options: Mapping[str, Any]) -> None:
        unknown = options.keys() - _OPTIONS
        if unknown:
            raise UsageError(f"unknown context {sorted(unknown)}; known: {sorted(CONTEXT_NAMES)}")


class _RemoteElements:
    """What the queue's proxy tells of keys, sent on."""

    def __init__(self, recorder: RemoteRecorder) -> None:
        self._recorder = recorder

    def note(self, keys: Sequence[str], tags: Sequence[Mapping[str, Any]]) -> None:
        self._recorder.send("note", list(keys), [dict(tag) for tag in tags])

    def note_slots(self, keys: Sequence[str], slots: Sequence[int]) -> None:
        self._recorder.send("note_slots", list(keys), list(slots))


class _Pipe:
    """The recorder's process, and the thread that writes to it so that training need not wait."""

    def __init__(self, greeting: bytes) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "lineage.sidecar"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the training process, which then closes this one in order
        )
        self._waiting: queue.Queue[bytes | None] = queue.Queue(_WAITING_MESSAGES)
        self._broken = False
        self._thread = threading.Thread(target=self._write, name="lineage-pipe", daemon=True)
        self._thread.start()
        self.put(greeting)
        answer = self._answer()
        if answer is None or "error" in answer:
            raise RecorderError(answer["error"] if answer else "the recorder's process could not start")

    def put(self, message: bytes) -> None:
        """Queue a message; nothing is sent once the process is gone."""
        if not self._broken:
            self._waiting.put(message)

    def close(self) -> dict[str, Any] | None:
        """Wait until everything is written and return the process's last word, None when it died without one."""
        self._waiting.put(None)
        self._thread.join()
        answer = self._answer()
        self._process.wait()
        return answer

    def _write(self) -> None:
        sink = cast("IO[bytes]", self._process.stdin)
        try:
            while (message := self._waiting.get()) is not None:
                sink.write(len(message).to_bytes(8, "little"))
                sink.write(message)
                sink.flush()
            sink.close()
        except OSError:  # the process is gone: training goes on, and the trace is torn where it was
            self._broken = True
            while self._waiting.get() is not None:
                pass

    def _answer(self) -> dict[str, Any] | None:
        line = cast("IO[bytes]", self._process.stdout).readline()
        return json.loads(line) if line else None


def _pickled(value: Any) -> bytes | None:
    try:
        return pickle.dumps(value, protocol=5)
    except Exception:  # pickling runs code of the objects themselves
        return None


def _lost(call: Call) -> Call:
    return (call[0], "drop", 1, f"a call of {call[1]} holds an object that cannot be pickled")


def _copied(value: Any) -> Any:
    """A shallow copy of what a caller could change before the message is made."""
    if isinstance(value, Mapping):
        return {name: list(item) if isinstance(item, list) else item for name, item in value.items()}
    return list(value) if isinstance(value, (list, tuple)) else value
