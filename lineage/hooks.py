"""What a traced program calls: the active recorder, the open stage, and the queue's proxy.

Enters: batches, keys and the names of stages. Leaves: rows of the trace. With no recorder installed every call is a
no-op, so a program keeps its hooks in place. Anyone may import this module; it imports neither torch nor the rest of
ours.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar, cast

from lineage.attach.transfer_queue import TracedQueue
from lineage.context import LossTerm, Optim, Resident, Sampling, Topology, Weights
from lineage.errors import LineageError, MissingExtraError, RecorderError, UserError, first_line
from lineage.keys import TrajectoryKey, parse_key
from lineage.recorder import NULL_RECORDER, NullRecorder, Recorder, reason_of
from lineage.remote import RemoteRecorder
from lineage.run import RunInfo, new_run_folder
from lineage.scopes import Scope, current_scope, current_stage
from lineage.stage import NullStage, Stage

__all__ = [
    "LineageError",
    "LossTerm",
    "MissingExtraError",
    "NullRecorder",
    "NullStage",
    "Optim",
    "Recorder",
    "RecorderError",
    "RemoteRecorder",
    "Resident",
    "RunInfo",
    "Sampling",
    "Scope",
    "Stage",
    "Topology",
    "TrajectoryKey",
    "UserError",
    "Weights",
    "current",
    "disabled",
    "first_line",
    "inside",
    "install",
    "new_run_folder",
    "open_recorder",
    "parse_key",
    "reason_of",
    "recorder",
    "scope",
    "trace_queue",
    "traced",
]

F = TypeVar("F", bound=Callable[..., Any])

AnyRecorder = Recorder | RemoteRecorder | NullRecorder

_active: AnyRecorder = NULL_RECORDER


def disabled() -> bool:
    """True when the environment switches tracing off (``LINEAGE_DISABLED=1``)."""
    return os.environ.get("LINEAGE_DISABLED", "") not in ("", "0")


def open_recorder(
    folder: Path,
    *,
    run_id: str | None = None,
    enabled: bool = True,
    config: Mapping[str, Any] | None = None,
    run: Mapping[str, Any] | None = None,
    profile: str = "lineage",
    sidecar: bool = False,
    **options: Any,
) -> AnyRecorder:
    """Open the recorder of this process and make it the active one.

    Args:
        folder: run folder; its name is the run id when none is given.
        enabled: False, or ``LINEAGE_DISABLED=1``, installs the recorder that does nothing.
        config: resolved configuration, kept in the trace.
        run: facts of the run (seed, model and tokenizer hash), kept in the trace.
        profile: whose formulas the checks use.
        sidecar: record in a process of its own: a few per cent of a short step instead of a tenth, for a second of
            start-up and another core.
        options: as for :class:`lineage.recorder.Recorder`.

    Raises:
        RecorderError: the folder cannot be written.
    """
    if not enabled or disabled():
        return install(NULL_RECORDER)
    info = RunInfo(run_id or Path(folder).name, profile, config or {}, run or {})
    kind = RemoteRecorder if sidecar else Recorder
    return install(kind(Path(folder), info, **options))


def install(active: AnyRecorder) -> AnyRecorder:
    """Make a recorder the active one of this process and return it."""
    global _active
    _active = active
    return active


def recorder() -> AnyRecorder:
    """The active recorder, or the one that does nothing."""
    return _active


def current() -> Stage | NullStage:
    """The innermost open stage of this task, or one whose verbs do nothing."""
    return current_stage()


def scope() -> Scope | None:
    """The innermost open stage of this task, to hand to another process that works in it; None where none is open."""
    return current_scope()


def inside(given: Scope | None) -> AbstractContextManager[Stage | NullStage]:
    """Open the stage another process works in, in the recorder of this one."""
    if given is None:
        return nullcontext(current())
    return _active.stage(given.stage, producer=given.producer, consumer=given.consumer, **given.context)


class traced(AbstractContextManager["Stage | NullStage"]):
    """Open a stage of the active recorder: in a ``with`` statement, or as a decorator of a function or coroutine.

    Args:
        stage: stage name.
        component: who acts in it, e.g. ``PPOTrainer._compute_advantage``.
        consumer: who reads what it makes.
        context: context columns for every row of the stage.
    """

    def __init__(
        self, stage: str, *, component: str | None = None, consumer: str | None = None, **context: Any
    ) -> None:
        self._arguments = (stage, component, consumer, context)

    def _open(self) -> AbstractContextManager[Stage | NullStage]:
        stage, component, consumer, context = self._arguments
        return _active.stage(stage, producer=component, consumer=consumer, **context)

    def __enter__(self) -> Stage | NullStage:
        self._entered = self._open()
        return self._entered.__enter__()

    def __exit__(self, *exception: Any) -> bool | None:
        return self._entered.__exit__(*exception)

    def __call__(self, function: F) -> F:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def traced_coroutine(*args: Any, **kwargs: Any) -> Any:
                with self._open():
                    return await function(*args, **kwargs)

            return cast(F, traced_coroutine)

        @functools.wraps(function)
        def traced_function(*args: Any, **kwargs: Any) -> Any:
            with self._open():
                return function(*args, **kwargs)

        return cast(F, traced_function)


def trace_queue(queue: Any) -> Any:
    """A proxy of any object with TransferQueue's interface that records each put, get, tag and clear."""
    return TracedQueue(queue)


@contextmanager
def recording(folder: Path, **options: Any) -> Iterator[AnyRecorder]:
    """Open a recorder for a ``with`` block; it is closed, and the one before is active again, at its end."""
    before = _active
    opened = open_recorder(folder, **options)
    try:
        yield opened
    except BaseException as error:
        opened.close(error)
        raise
    else:
        opened.close()
    finally:
        install(before)
