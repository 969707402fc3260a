"""What a step lacks that was begun and never sealed, held against the last whole step before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lineage.traces.trace import Trace

_STAGES_SHOWN = 6

# What is not due in every step says nothing of this one, and how many events there are is chance.
_EVENTS = """
    with seen as (
        select coalesce(run_id, '') as run, global_steps as step, process, stage, op, field, min(time_ns) as at,
            min(seq) as seq
        from stored
        where global_steps > 0 and stage not in ('checkpoint', 'validate', 'dump') and partition is distinct from 'val'
        group by all
    ),
    torn as (select * from (values {torn}) as t(run, step)),
    whole as (
        select torn.run, torn.step, max(seen.step) as beside
        from torn join seen on seen.run = torn.run and seen.step < torn.step
        where (seen.run, seen.step) not in (select (run, step) from torn)
        group by all
    )
    select whole.run, whole.step, whole.beside, w.process, w.stage, w.op, w.field, t.at is null
    from whole
    join seen as w on w.run = whole.run and w.step = whole.beside
    left join seen as t on t.run = whole.run and t.step = whole.step
        and (t.process, t.stage, t.op, t.field) is not distinct from (w.process, w.stage, w.op, w.field)
    order by whole.run, whole.step, w.at, w.seq
"""


@dataclass(frozen=True)
class Lack:
    """What one torn step lacks.

    Attributes:
        run_id: of its run.
        step: the torn step.
        beside: the whole step it is held against.
        silent: processes of which nothing of the step was kept: what a process that is killed holds goes with it.
        ends: of each other process that did not come to its end, the first event it lacks: stage, op and field.
        stages: stages of which there is no event at all.
    """

    run_id: str
    step: int
    beside: int
    silent: tuple[str, ...]
    ends: dict[str, tuple[str, str, str]]
    stages: tuple[str, ...]

    @property
    def first(self) -> tuple[str, str, str] | None:
        """The first event that a process did not come to that has told of the step at all."""
        return next(iter(self.ends.values()), None)

    def sentence(self) -> str:
        """The lack, as a sentence of a report."""
        nothing = [f"{process} left nothing" for process in self.silent]
        ends = [f"{process} ends before {' '.join(event)}" for process, event in self.ends.items()]
        without = f"no process has {_listed(self.stages)}" if self.stages else ""
        return f"step {self.step} next to step {self.beside}: {'; '.join(filter(None, [*nothing, *ends, without]))}"


def lacks(trace: Trace) -> Iterator[Lack]:
    """What each torn step lacks; nothing is said of one with no whole step before it.

    Args:
        trace: of one run or several.
    """
    torn = sorted(one for one in trace.source.unseen if one[1] in trace.state.torn)
    if not torn:
        return
    query = _EVENTS.format(torn=", ".join(f"({_quoted(run)}, {step})" for run, step in torn))
    of_step: dict[tuple[str, int, int], list[tuple[str, str, str, str, bool]]] = {}
    for run, step, beside, process, *event, missing in trace.connection.execute(query).fetchall():
        of_step.setdefault((run, step, beside), []).append((process, *(str(part or "") for part in event), missing))
    for (run, step, beside), events in of_step.items():
        ends: dict[str, tuple[str, str, str]] = {}
        for process, stage, op, field, missing in events:
            if missing:
                ends.setdefault(process, (stage, op, field))
        told = {process for process, _, _, _, missing in events if not missing}
        silent = tuple(process for process in ends if process not in told)
        for process in silent:
            del ends[process]
        present = {stage for _, stage, _, _, missing in events if not missing}
        stages = dict.fromkeys(stage for _, stage, _, _, missing in events if missing and stage not in present)
        if silent or ends:
            yield Lack(run, step, beside, silent, ends, tuple(stages))


def _listed(stages: Sequence[str]) -> str:
    shown = ", ".join(stages[:_STAGES_SHOWN])
    return shown + (f" and {len(stages) - _STAGES_SHOWN} more stages" if len(stages) > _STAGES_SHOWN else "")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
