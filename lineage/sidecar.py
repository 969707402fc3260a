"""The recorder's own process: reads the calls of :mod:`lineage.remote` from its input and replays them on a recorder.

Started as ``python -m lineage.sidecar``. The first message says where and what to record; then each is one call. It
answers one JSON line when the recorder has started, one when it has ended, and, where the training process waits for
``on_step_sealed``, one a sealed step. When the training process is killed its input ends, and the trace is left as that
process would have left it: whole steps, and the torn one named.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import sys
from typing import IO, Any

from lineage.errors import CheckError, LineageError, ViolationError
from lineage.recorder import Recorder
from lineage.stage import Stage

log = logging.getLogger("lineage")


class Replay:
    """Calls of a training process, done on a recorder.

    Args:
        recorder: where the rows go.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._stages: dict[int, Stage] = {}
        self._ended: list[int] = []  # stages that ended in this step
        self._waiting: list[list[int]] = []  # and in those before
        self._time_ns = 0
        recorder.now = lambda: self._time_ns

    def do(self, call: tuple[Any, ...]) -> None:
        """Do one call; rows keep the time at which it was made. A call that fails is counted, and the next is done.

        Raises:
            ViolationError, CheckError: the call sealed a step, and ``on_step_sealed`` raised it.
        """
        self._time_ns, name, *arguments = call
        try:
            self._do(name, arguments)
        except (ViolationError, CheckError):
            self._forget_old_stages()
            raise
        except Exception as error:
            self.recorder.drop(1, f"{name}: {type(error).__name__}: {error}")

    def _do(self, name: str, arguments: list[Any]) -> None:
        if name == "verb":
            self._verb(*arguments)
        elif name == "open":
            self._open(*arguments)
        elif name == "close":
            if (stage := self._stages.get(arguments[0])) is not None:
                stage.close()
                self._ended.append(arguments[0])
        elif name in ("note", "note_slots"):
            getattr(self.recorder.elements, name)(*arguments)
        else:
            getattr(self.recorder, name)(*arguments)
        if name == "seal":
            self._forget_old_stages()

    def _open(
        self,
        number: int,
        outer: int | None,
        name: str,
        producer: str | None,
        consumer: str | None,
        context: dict[str, Any],
    ) -> None:
        parent = None if outer is None else self._stages.get(outer)
        stage = self.recorder.make_stage(name, producer, consumer, context, parent)
        if parent is not None:
            parent.children[number] = stage
        self._stages[number] = stage

    def _forget_old_stages(self) -> None:
        """Stages that ended stay for two more steps, for late writers; whoever writes later is counted as lost."""
        self._waiting = [*self._waiting, self._ended][-3:]
        self._ended = []
        if len(self._waiting) == 3:
            for number in self._waiting[0]:
                self._stages.pop(number, None)

    def _verb(self, number: int, verb: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        stage = self._stages.get(number)
        if stage is None:
            self.recorder.drop(1, f"{verb}: a record into a stage that ended steps ago")
            return
        getattr(stage, verb)(*arguments, **options)


class Answers:
    """Answers to the training process, a JSON line each.

    They have the standard output for themselves: what somebody's check prints goes to the standard error.
    """

    def __init__(self) -> None:
        self._lines = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def send(self, verdict: LineageError | None = None, **said: Any) -> None:
        """Send one, with what ``on_step_sealed`` raised."""
        if isinstance(verdict, ViolationError):
            said |= {"violation": verdict.headline, "global_steps": verdict.global_steps}
        elif verdict is not None:
            said["unchecked"] = str(verdict)
        print(json.dumps(said), file=self._lines, flush=True)


def main() -> None:
    """Read, replay, answer."""
    source, answers = sys.stdin.buffer, Answers()
    try:
        folder, info, options, waited_for = pickle.loads(_message(source) or b"")
    except Exception as error:  # an option of a class that this process does not know
        said = f"{type(error).__name__}: {error}"
        answers.send(
            started=f"the recorder's process cannot read its options ({said}); record inside this one: sidecar=False"
        )
        return
    try:
        recorder = Recorder(folder, info, **options)
    except LineageError as error:
        answers.send(started=str(error))
        return
    answers.send(started=True)
    replay = Replay(recorder)
    while (message := _message(source)) is not None:
        call = _call(message, recorder)
        if call is None:
            continue
        verdict: LineageError | None = None
        if call[1] == "end":
            trace = None
            try:
                trace = recorder.end(*call[2:])
            except (ViolationError, CheckError) as error:
                verdict = error
            answers.send(verdict, trace=None if trace is None else str(trace))
            return
        try:
            replay.do(call)
        except (ViolationError, CheckError) as error:
            verdict = error
        if call[1] == "seal" and waited_for:
            answers.send(verdict, sealed=recorder.global_steps)
        elif verdict is not None:
            log.error("lineage: %s", verdict)


def _call(message: bytes, recorder: Recorder) -> tuple[Any, ...] | None:
    """The call of a message; None, and one more row lost, where it holds an object of a class not known here.

    What is waited for (``seal``, ``end``) holds none.
    """
    try:
        return tuple(pickle.loads(message))
    except Exception as error:
        recorder.drop(1, f"a call could not be read: {type(error).__name__}: {error}")
        return None


def _message(source: IO[bytes]) -> bytes | None:
    """The next message, or None where the input ends, a half-written message included."""
    head = source.read(8)
    size = int.from_bytes(head, "little")
    body = source.read(size) if len(head) == 8 else b""
    return body if len(head) == 8 and len(body) == size else None


if __name__ == "__main__":
    main()
