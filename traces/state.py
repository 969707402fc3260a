"""What a trace says of its own completeness: closed, torn, dropped, or still being recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class State:
    """What a trace says of its own completeness.

    Attributes:
        closed: the run ended in order; a trace that does not say is taken as closed.
        torn: steps begun and never sealed.
        dropped_rows: rows lost.
        dropped_steps: steps they were lost in.
        why: why rows were dropped, or what ended the run.
        live: processes that still recorded when the trace was opened, as ``process 1234``.
        open: steps that were not whole then: begun by a live process, or about to be removed.
        removed: how many steps ``trace.keep_steps`` has removed; they are no loss.
    """

    closed: bool = True
    torn: tuple[int, ...] = ()
    dropped_rows: int = 0
    dropped_steps: tuple[int, ...] = ()
    why: str = ""
    live: tuple[str, ...] = ()
    open: tuple[int, ...] = ()
    removed: int = 0

    @property
    def unseen(self) -> tuple[int, ...]:
        """Steps that cannot be judged, because some of their rows are missing."""
        return tuple(sorted({*self.torn, *self.open, *self.dropped_steps}))

    @property
    def complete(self) -> bool:
        """True when every row of every step is here."""
        return self.closed and not self.unseen and self.dropped_rows == 0

    def sentence(self) -> str:
        """One clause that names what is missing; empty for a complete trace."""
        parts = []
        if self.torn:
            parts.append(f"step {_join(self.torn)} torn")
        if self.dropped_rows:
            where = f" in step {_join(self.dropped_steps)}" if self.dropped_steps else ""
            parts.append(f"{self.dropped_rows} rows dropped{where}")
        if self.live:
            parts.append(f"the run goes on ({'; '.join(self.live)})")
        elif not self.closed:
            parts.append("the run did not close its trace")
        return ", ".join(parts) + (f" ({self.why})" if self.why and parts else "")


def read_state(said: Mapping[str, Any]) -> State:
    """The state a trace's ``lineage.state`` metadata describes."""
    dropped = said.get("dropped") or {}
    reasons = [str(why) for why in dropped.get("why", ())] + ([str(said["error"])] if said.get("error") else [])
    return State(
        bool(said.get("closed", True)),
        _numbers(said.get("torn")),
        int(dropped.get("rows", 0)),
        _numbers(dropped.get("steps")),
        "; ".join(dict.fromkeys(reasons)),
        tuple(_process(one) for one in said.get("live") or ()),
        _numbers(said.get("open")),
        sum((last - first) // stride + 1 for first, last, stride in said.get("removed") or ()),
    )


def merge(states: Sequence[State]) -> State:
    """The state of several files read as one trace: closed when all are, torn and dropped together."""
    return State(
        all(state.closed for state in states),
        _numbers(step for state in states for step in state.torn),
        sum(state.dropped_rows for state in states),
        _numbers(step for state in states for step in state.dropped_steps),
        "; ".join(dict.fromkeys(state.why for state in states if state.why)),
        tuple(dict.fromkeys(one for state in states for one in state.live)),
        _numbers(step for state in states for step in state.open),
        max((state.removed for state in states), default=0),
    )


def _numbers(steps: Iterable[int] | None) -> tuple[int, ...]:
    return tuple(sorted({int(step) for step in steps or ()}))


def _process(said: Mapping[str, Any]) -> str:
    """``process 1234, step 7 open`` of a live process."""
    step = said.get("step")
    return f"process {said.get('pid')}" + (f", step {step} open" if step is not None else ", before its first step")


def _join(steps: tuple[int, ...] | list[int]) -> str:
    shown = ", ".join(str(step) for step in steps[:5])
    return shown + (f" and {len(steps) - 5} more" if len(steps) > 5 else "")
