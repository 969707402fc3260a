"""The recorder in a process of its own, seen from the training process.

Here a record costs a snapshot of the tensors and, once a step, pickling it. Columns, statistics, Arrow and the
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
from lineage.elements import KNOWN_TAGS
from lineage.errors import CheckError, RecorderError, ViolationError
from lineage.freeze import Frozen, FrozenNested, FrozenObjects, freeze
from lineage.recorder import reason_of
from lineage.run import RunInfo
from lineage.scopes import StageScopes
from lineage.stage import Keys, Stage
from lineage.stage_rows import Columns, check_context, guarded

if TYPE_CHECKING:
    from lineage.recorder import OnStepSealed, Recorder

log = logging.getLogger("lineage")

Call = tuple[Any, ...]

_OPTIONS = frozenset({"keys", "entity", "mask", "columns", "lengths", "left_padded", "fields", "field"})
_MESSAGE_BYTES = 32 << 20  # calls are sent when they hold so much: weights and long batches go as they come
_WAITING_BYTES = 256 << 20  # beyond this the training process waits for the recorder's


class RemoteRecorder(StageScopes):
    """Sends what is recorded to a recorder in another process. Same verbs, same rows as :class:`Recorder`.

    Args:
        folder: run folder.
        info: what the file says of the run.
        every: trace one step of so many, the first one always.
        on_step_sealed: as for :class:`Recorder`; pickled, and called in the other process. What it raises comes out of
            :meth:`seal` here, which waits for it, unless it has an attribute ``waits`` that is false.
        options: further options of the recorder.

    Raises:
        RecorderError: the recorder could not start.
    """

    def __init__(
        self,
        folder: Path,
        info: RunInfo,
        *,
        every: int = 1,
        on_step_sealed: OnStepSealed | None = None,
        **options: Any,
    ) -> None:
        super().__init__(every)
        self.folder = Path(folder)
        self.elements = _RemoteElements(self)
        self._calls: list[Call] = []
        self._bytes = 0
        self._stages = 0
        self._closed = False
        self._waits = on_step_sealed is not None and bool(getattr(on_step_sealed, "waits", True))
        self._sealed = True
        options |= {"every": every, "on_step_sealed": on_step_sealed}
        try:
            greeting = pickle.dumps((self.folder, info, options, self._waits))
        except Exception as error:  # pickling runs code of the objects themselves
            raise RecorderError(
                f"the recorder's process cannot be told its options ({error}); record inside this one: sidecar=False"
            ) from error
        self._pipe = _Pipe(greeting)

    def step(self, global_steps: int) -> None:
        """Name the step that begins; the other process is told at once, so that a kill leaves it named."""
        if self._waits and not self._sealed:
            self.seal()
        self.global_steps = int(global_steps)
        self.send("step", self.global_steps)
        self.flush()

    def seal(self) -> None:
        """End the step: what was recorded goes to the other process, whose verdict is waited for if there is one.

        Raises:
            ViolationError: ``on_step_sealed`` says that the step broke a contract.
            CheckError: it says that the step could not be checked, or the other process is gone.
        """
        self.send("seal")
        self.flush()
        self._sealed = True
        if not self._waits:
            return
        answer = self._pipe.answer("sealed")
        if answer is None:
            raise CheckError(f"the recorder's process is gone: step {self.global_steps} could not be checked")
        _raise(answer)

    def close(self, error: BaseException | str | None = None) -> Path | None:
        """Seal what is open and wait until the other process has compacted the trace.

        Args:
            error: what ended the run, if it did not end in order.

        Returns:
            The trace, or None where only the parts could be kept.

        Raises:
            ViolationError, CheckError: as :meth:`seal`, of what was not yet sealed; the trace is closed by then.
        """
        if self._closed:
            return None
        self._closed = True
        self.send("end", reason_of(error), isinstance(error, (ViolationError, CheckError)))
        self.flush()
        answer = self._pipe.close()
        if answer is None:
            log.error("lineage: the recorder's process is gone; what it wrote stays in parts under %s", self.folder)
            return None
        _raise(answer)
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
        """Add a call to those of the step; ``nbytes`` is about what it holds."""
        self._calls.append((time.time_ns(), *call))
        self._sealed = False
        self._bytes += nbytes
        if self._bytes > _MESSAGE_BYTES:
            self.flush()

    def forget(self, keys: Sequence[str]) -> None:
        """Cleared keys: their tags go when the step is sealed."""
        self.send("forget", list(keys))

    def drop(self, rows: int, why: str) -> None:
        """Count rows that were lost."""
        self.send("drop", rows, why)

    def flush(self) -> None:
        """Hand the calls so far to the other process, each pickled by itself: one that holds an object of the caller's
        which cannot be pickled here, or read there, is lost alone.
        """
        calls, self._calls, self._bytes = self._calls, [], 0
        self._pipe.put([_pickled(call) for call in calls])


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

    @guarded
    def record(self, op: str, batch: Any, **options: Any) -> None:
        """Send snapshots of a batch's fields. Arguments as for :meth:`Stage.record`."""
        check_context(options, _OPTIONS)
        items = frozen_items(batch, options.pop("fields", None))
        if options.get("mask") is not None:
            options["mask"] = freeze(options["mask"])
        options["container"] = options.get("container") or container_name(batch)
        self._send("record", (op, items), options, sum(map(_size, items.values())))

    @guarded
    def compare(self, field: str, a: Any, against: str, b: Any, **options: Any) -> None:
        """Send both sides of a comparison. Arguments as for :meth:`Stage.compare`."""
        check_context(options, _OPTIONS)
        if options.get("mask") is not None:
            options["mask"] = freeze(options["mask"])
        self._send("compare", (field, freeze(a), against, freeze(b)), options)

    @guarded
    def event(self, op: str, field: str, **options: Any) -> None:
        """Send a row without elements. Arguments as for :meth:`Stage.event`."""
        check_context(options, _OPTIONS)
        self._send("event", (op, field), options)

    @guarded
    def params(self, op: str, named_tensors: Mapping[str, Any], **options: Any) -> None:
        """Send named tensors at once: no copy of them is kept here. Arguments as for :meth:`Stage.params`."""
        check_context(options, _OPTIONS)
        self._send(
            "params", (op, {name: freeze(tensor, copy=False) for name, tensor in named_tensors.items()}), options
        )
        self._remote.flush()

    @guarded
    def metrics(self, values: Mapping[str, float], **options: Any) -> None:
        """Send metrics by name. Arguments as for :meth:`Stage.metrics`."""
        check_context(options, _OPTIONS)
        self._send("metrics", ({str(name): float(value) for name, value in values.items()},), options)

    def close(self) -> None:
        """End the stage there too."""
        self.children.clear()
        self._remote.send("close", self.number)

    @guarded
    def _keys_only(self, op: str, keys: Keys, columns: Columns, options: dict[str, Any]) -> None:
        check_context(options, _OPTIONS)
        self._send("_keys_only", (op, list(keys), dict(columns), options), {})

    def _send(self, verb: str, arguments: tuple[Any, ...], options: dict[str, Any], nbytes: int = 0) -> None:
        snapshot = {name: _copied(value) for name, value in options.items()}
        if options.get("attrs"):
            snapshot["attrs"] = {str(name): str(value) for name, value in options["attrs"].items()}
        self._remote.send("verb", self.number, verb, arguments, snapshot, nbytes=nbytes)


class _RemoteElements:
    """What the queue's proxy tells of keys, sent on."""

    def __init__(self, recorder: RemoteRecorder) -> None:
        self._recorder = recorder

    def note(self, keys: Sequence[str], tags: Sequence[Mapping[str, Any]]) -> None:
        # only what the recorder reads of a tag: the rest may be of classes the other process does not know
        known = [{name: tag[name] for name in KNOWN_TAGS.intersection(tag)} for tag in tags]
        self._recorder.send("note", list(keys), known)

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
        self._waiting: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
        self._room = threading.Condition()
        self._queued = 0
        self._broken = False
        self._thread = threading.Thread(target=self._write, name="lineage-pipe", daemon=True)
        self._thread.start()
        self.put([greeting])
        answer = self.answer("started")
        if answer is None or answer["started"] is not True:
            raise RecorderError(answer["started"] if answer else "the recorder's process could not start")

    def put(self, messages: list[bytes]) -> None:
        """Queue messages, when there is room; nothing is sent once the process is gone."""
        with self._room:
            self._room.wait_for(lambda: self._broken or self._queued < _WAITING_BYTES)
            self._queued += sum(map(len, messages))
        if not self._broken:
            self._waiting.put(messages)

    def close(self) -> dict[str, Any] | None:
        """Wait until everything is written and return the process's last word, None when it died without one."""
        self._waiting.put(None)
        self._thread.join()
        answer = self.answer("trace")
        self._process.wait()
        return answer

    def answer(self, name: str) -> dict[str, Any] | None:
        """The next answer that has this name; None once the process is gone. An interrupted wait left others unread."""
        while line := cast("IO[bytes]", self._process.stdout).readline():
            answer: dict[str, Any] = json.loads(line)
            if name in answer:
                return answer
        return None

    def _write(self) -> None:
        sink = cast("IO[bytes]", self._process.stdin)
        try:
            while (messages := self._waiting.get()) is not None:
                for message in messages:
                    sink.write(len(message).to_bytes(8, "little"))
                    sink.write(message)
                sink.flush()
                with self._room:
                    self._queued -= sum(map(len, messages))
                    self._room.notify()
            sink.close()
        except OSError:  # the process is gone: training goes on, and the trace is torn where it was
            with self._room:
                self._broken = True
                self._room.notify()


def _raise(answer: Mapping[str, Any]) -> None:
    """Raise what the other process's ``on_step_sealed`` raised."""
    if answer.get("violation") is not None:
        raise ViolationError(answer["violation"], answer["global_steps"])
    if answer.get("unchecked") is not None:
        raise CheckError(answer["unchecked"])


def _pickled(call: Call) -> bytes:
    """The call, or that it was lost."""
    try:
        return pickle.dumps(call, protocol=5)
    except Exception:  # pickling runs code of the objects themselves
        lost = (call[0], "drop", 1, f"a call of {call[1]} holds an object that cannot be pickled")
        return pickle.dumps(lost, protocol=5)


def _size(item: Frozen) -> int:
    if isinstance(item, FrozenObjects):
        return sum(map(len, item.blobs))
    return item.values.nbytes if isinstance(item, FrozenNested) else item.array.nbytes


def _copied(value: Any) -> Any:
    """A shallow copy of what a caller could change before the message is made."""
    if isinstance(value, Mapping):
        return {name: list(item) if isinstance(item, list) else item for name, item in value.items()}
    return list(value) if isinstance(value, (list, tuple)) else value
