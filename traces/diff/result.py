"""What a comparison of two traces says."""

from __future__ import annotations

from dataclasses import dataclass, field

from lineage.traces.diff.aspects import BY_NAME, CONTENT


@dataclass(frozen=True)
class Event:
    """A row of one side."""

    process: str
    seq: int | None


@dataclass(frozen=True)
class Difference:
    """One fact that differs, with those of the same event that differ alike.

    Attributes:
        aspect: in which way.
        global_steps, stage, op, field, entity: where; no step is null.
        key: whose fact it is; None where its row has no keys.
        turn: which turn, of the entity turn.
        a: the event on the one side; None where it has none.
        b: on the other.
        expected: what the one side says.
        actual: what the other says.
        alike: facts of this event that differ alike, this one among them.
        keys: theirs, at most :data:`KEYS`.
    """

    aspect: str
    global_steps: int | None
    stage: str
    op: str
    field: str
    entity: str
    key: str | None
    turn: int | None
    a: Event | None
    b: Event | None
    expected: str
    actual: str
    alike: int = 1
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Count:
    """How many facts of one stage and field differ in one way.

    Attributes:
        aspect, group: in which way.
        counts: False where it is allowed: listed, and the traces are not different for it.
        facts: how many, those of one side alone among them.
        only_a: facts that only the one side has.
        only_b: facts that only the other has.
        first_step: the first step with one; None for rows without a step.
    """

    aspect: str
    group: str
    counts: bool
    stage: str
    op: str
    field: str
    facts: int
    only_a: int
    only_b: int
    first_step: int | None


@dataclass(frozen=True)
class MissingStage:
    """A stage that one side has in steps where the other has not.

    Attributes:
        stage: which.
        only: ``a`` or ``b``, the side that has it.
        steps: where.
    """

    stage: str
    only: str
    steps: tuple[int, ...]


@dataclass(frozen=True)
class Setting:
    """A setting of the two runs that is not the same; None where a side does not know it."""

    name: str
    a: object
    b: object


@dataclass(frozen=True)
class TraceSide:
    """One of the two traces.

    Attributes:
        trace: where it lies.
        run_id: of its run, empty where it says none.
        rows, facts: how many it has.
        compared: facts of the steps that were compared.
        processes: how many wrote it.
        incomplete: what is missing in it; empty where it is complete.
    """

    trace: str
    run_id: str
    rows: int
    facts: int
    compared: int
    processes: int
    incomplete: str


@dataclass(frozen=True)
class Diff:
    """What a comparison of two traces found.

    Attributes:
        a, b: the traces; the one is what is expected, the other what is there.
        steps: that were compared.
        only_a, only_b: steps that one side alone has.
        unseen: steps that are not whole on a side, which are not compared.
        complete: nothing that was to be compared is missing on a side.
        first: the first event in which they part in a way that counts: in content, where there is one.
        counts: all differences by aspect, stage, op and field.
        differences: examples of each aspect, the first ones.
        stages: that one side lacks.
        settings: of the runs, that are not the same; they never count.
        disjoint: no key is on both sides, so nothing was compared.
        allowed: aspects that do not count.
    """

    a: TraceSide
    b: TraceSide
    steps: tuple[int, ...]
    only_a: tuple[int, ...]
    only_b: tuple[int, ...]
    unseen: tuple[int, ...]
    complete: bool
    first: Difference | None
    counts: tuple[Count, ...]
    differences: tuple[Difference, ...]
    stages: tuple[MissingStage, ...]
    settings: tuple[Setting, ...]
    disjoint: bool
    allowed: tuple[str, ...] = field(default=())

    @property
    def equal(self) -> bool:
        """Nothing that counts differs in what could be compared."""
        steps = bool(self.only_a or self.only_b) and "steps" not in self.allowed
        return not (self.disjoint or steps or any(count.counts for count in self.counts))


def of_content(aspect: str) -> bool:
    """True for an aspect of what the run computed."""
    return BY_NAME[aspect].group == CONTENT
