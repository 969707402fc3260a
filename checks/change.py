"""Between which two events the content at fault changed: what the headline of a content fault says beside itself.

Asked once a report, when something failed, and of one step: the events of that step that show the culprit, in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import duckdb

from lineage.checks.verdict import Violation
from lineage.traces import Trace

# Ops that give a field its content; every other one is to hand it on as it is.
PRODUCING = frozenset({"produce", "generate", "score", "forward"})


@dataclass(frozen=True)
class Event:
    """One event of the step, as a report names it."""

    op: str
    field: str
    stage: str
    process: str
    seq: int

    def __str__(self) -> str:
        return f"{self.op} {self.field} in {self.stage} ({self.process}, seq {self.seq})"


@dataclass(frozen=True)
class Change:
    """Where one trajectory's content stopped being what its producer wrote.

    Attributes:
        what: ``content`` of the field, or its ``mask``.
        producer: who wrote it.
        written: the event that wrote it.
        before: the last event that still had it.
        after: the first that had the other.
        whose: the key whose content it has since; None where it is nobody's.
    """

    what: str
    producer: str
    written: Event
    before: Event
    after: Event
    whose: str | None = None


@dataclass(frozen=True)
class _Sight:
    """What one event shows of the culprit."""

    event: Event
    producer: str
    span: str | None
    content: tuple[int | None, int | None]
    mask: tuple[int | None, int | None]


def change(trace: Trace, violation: Violation) -> Change | None:
    """The change that a violation shows, if it shows one.

    Args:
        trace: an open trace.
        violation: the first bad event; where it names no element, there is no telling.
    """
    if violation.key is None:
        return None
    sights = list(_sights(trace.connection, violation))
    at = next((i for i, one in enumerate(sights) if _is(one.event, violation)), None)
    if at is None:
        return None
    found = _of_content(sights, at)
    if found is not None:
        return replace(found, whose=_whose(trace.connection, violation, sights[at]))
    return _of_mask(sights, at)


def _is(event: Event, violation: Violation) -> bool:
    return (event.process, event.seq) == (violation.process, violation.seq)


def _sights(con: duckdb.DuckDBPyConnection, violation: Violation) -> Iterator[_Sight]:
    """The events of the step that show the culprit under the violation's field or under a mask, in order."""
    query = """
        with step as (
            select op, field, stage, process, seq, time_ns, coalesce(producer, '') as producer, span,
                list_position(key, $key) as place, valid_length, fingerprint, mask_sum, mask_fingerprint
            from stored
            where run_id is not distinct from $run_id and global_steps = $step and op <> 'compare'
                and (field = $field or mask_fingerprint is not null)
                and entity in (
                    select entity from stored
                    where run_id is not distinct from $run_id and global_steps = $step and process = $process
                        and seq = $seq
                )
        )
        select op, field, stage, process, seq, producer, span, valid_length[place], fingerprint[place], mask_sum[place],
            mask_fingerprint[place]
        from step
        where place > 0
        order by case when (select count(distinct process) from step) > 1 then time_ns else seq end, process, seq
    """
    named = {
        "key": violation.key,
        "run_id": violation.run_id,
        "step": violation.global_steps,
        "field": violation.field,
        "process": violation.process,
        "seq": violation.seq,
    }
    for op, field, stage, process, seq, producer, span, length, print_, summed, mask in con.execute(
        query, named
    ).fetchall():
        event = Event(op, field, stage, process, seq)
        yield _Sight(event, producer, span, (length, print_), (summed, mask))


def _of_content(sights: Sequence[_Sight], at: int) -> Change | None:
    """The field was handed on as something else than was last written."""
    bad = sights[at]
    if bad.event.op in PRODUCING or bad.content[1] is None:
        return None
    same = [
        one
        for one in sights[: at + 1]
        if one.event.field == bad.event.field and one.span == bad.span and one.content[1] is not None
    ]
    wrote = next((i for i in reversed(range(len(same))) if same[i].event.op in PRODUCING), None)
    if wrote is None or same[wrote].content == bad.content:
        return None
    found = _between(same[wrote:], [one.content for one in same[wrote:]])
    return found and Change("content", *found)


def _of_mask(sights: Sequence[_Sight], at: int) -> Change | None:
    """The mask it was used under is not the one that was written."""
    bad = sights[at]
    seen = [one for one in sights[: at + 1] if one.mask[1] is not None and one.span == bad.span]
    wrote = next(
        (i for i, one in enumerate(seen) if one.event.op in PRODUCING and one.event.field == "response_mask"), None
    )
    if wrote is None or bad.mask[1] is None or seen[wrote].mask == bad.mask:
        return None
    found = _between(seen[wrote:], [one.mask for one in seen[wrote:]])
    return found and Change("mask", *found)


def _between(
    sights: Sequence[_Sight], said: Sequence[tuple[int | None, int | None]]
) -> tuple[str, Event, Event, Event] | None:
    """Who wrote the first, that event, the last that agrees with it before the last differs, and the next."""
    last = max(i for i, one in enumerate(said) if one == said[0])
    if last + 1 == len(sights):
        return None
    return sights[0].producer, sights[0].event, sights[last].event, sights[last + 1].event


def _whose(con: duckdb.DuckDBPyConnection, violation: Violation, bad: _Sight) -> str | None:
    """The key under which this content was written in the same step."""
    query = """
        select key[list_position(fingerprint, $content)]
        from stored
        where run_id is not distinct from $run_id and global_steps = $step and field = $field and op = 'produce'
            and span is not distinct from $span and list_contains(fingerprint, $content)
        order by seq desc
        limit 1
    """
    named = {
        "content": bad.content[1],
        "run_id": violation.run_id,
        "step": violation.global_steps,
        "field": violation.field,
        "span": bad.span,
    }
    found = con.execute(query, named).fetchone()
    return found[0] if found and found[0] != violation.key else None
