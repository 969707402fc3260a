"""Which stage is open: the scope a record belongs to, per task, in whichever recorder is active."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lineage.errors import RecorderError
from lineage.stage import NullStage, Stage

_current: contextvars.ContextVar[Stage | None] = contextvars.ContextVar("lineage_stage", default=None)

NULL_STAGE = NullStage()


def current_stage() -> Stage | NullStage:
    """The innermost open stage of this task, or one whose verbs do nothing."""
    return _current.get() or NULL_STAGE


@dataclass(frozen=True)
class Scope:
    """A stage as it can be told to another process, which opens the same one in its own recorder.

    Attributes:
        stage, producer, consumer, context: as of :meth:`StageScopes.stage`.
    """

    stage: str
    producer: str | None
    consumer: str | None
    context: Mapping[str, Any]


def current_scope() -> Scope | None:
    """The innermost open stage of this task, to be opened elsewhere."""
    stage = _current.get()
    return None if stage is None else Scope(stage.name, stage.producer, stage.consumer, dict(stage.context))


class StageScopes:
    """Opens stages for a recorder: nested stages merge under the outer one, untraced steps give stages that do nothing.

    Args:
        every: trace one step of so many, the first one always.
    """

    enabled = True

    def __init__(self, every: int) -> None:
        if every < 1:
            raise RecorderError(f"every={every}: trace one step of at least 1")
        self.global_steps = 0
        self._every = every

    @property
    def tracing(self) -> bool:
        """True in a step that is traced (``trace.every``)."""
        return self.global_steps == 0 or (self.global_steps - 1) % self._every == 0

    def make_stage(
        self, name: str, producer: str | None, consumer: str | None, context: dict[str, Any], parent: Stage | None
    ) -> Stage:
        """A new stage, inside ``parent`` or on its own."""
        raise NotImplementedError

    @contextmanager
    def stage(
        self, name: str, *, producer: str | None = None, consumer: str | None = None, **context: Any
    ) -> Iterator[Stage | NullStage]:
        """Open a stage; what is recorded inside belongs to it.

        Args:
            name: stage name, one of ``vocabulary.STAGES`` or your own.
            producer: the component at work.
            consumer: the component that reads what it makes.
            context: context columns for every row of the stage.
        """
        if not self.tracing:
            yield NULL_STAGE
            return
        outer = _current.get()
        parent = outer if outer is not None and outer.recorder is self else None
        stage = None
        if parent is None:
            stage = self.make_stage(name, producer, consumer, context, None)
        else:
            same = (name, producer, consumer, *sorted((key, str(value)) for key, value in context.items()))
            stage = parent.children.get(same)
            if stage is None:
                stage = self.make_stage(name, producer, consumer, {**parent.context, **context}, parent)
                parent.children[same] = stage
        token = _current.set(stage)
        try:
            yield stage
        finally:
            _current.reset(token)
            if parent is None:
                stage.close()
