"""What a step is judged beside: the steps before it that share its keys, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc

KEEP_BYTES = 64 << 20
_KEEP_KEYS = 100_000  # names of keys kept after the rows of their step are gone
_ENTITIES = pa.array(["trajectory", "prompt"])
Number = TypeVar("Number", int, int | None)


def beside(steps: Sequence[Number], own: Collection[Number], shares: Callable[[Number], bool]) -> list[Number]:
    """The steps of one run that some consecutive ones are judged among, their own included, in the order given.

    A contract looks across steps by a key (a late write, a clear that comes too late, content first written before) or
    at the step before. So the rows a step needs are those of step 0, of the step before, and of every step that has a
    key in common with it.

    Args:
        steps: their numbers, in order.
        own: those judged.
        shares: whether a step has a key in common with one of them.
    """
    first = next(at for at, step in enumerate(steps) if step in own)
    before = steps[max(first - 1, 0)]
    return [step for step in steps if step in (0, before) or step in own or shares(step)]


@dataclass
class _Step:
    batches: list[pa.RecordBatch] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    nbytes: int = 0
    forgotten: dict[str, int] = field(default_factory=dict)


class Window:
    """The last steps of a run, and which keys were in them: a step that is sealed is judged :func:`beside` them.

    Args:
        keep_bytes: bytes of rows kept beside step 0, the step before and the last one.
    """

    def __init__(self, keep_bytes: int = KEEP_BYTES) -> None:
        self._keep_bytes = keep_bytes
        self._steps: dict[int, _Step] = {}
        self._gone: dict[str, int] = {}

    def add(self, batch: pa.RecordBatch, global_steps: int) -> None:
        """Take rows of a step; the oldest steps go when there are too many."""
        step = self._steps.setdefault(global_steps, _Step())
        keys = keys_of(batch)
        step.batches.append(batch)
        step.keys |= keys
        step.nbytes += batch.nbytes
        step.forgotten |= {key: self._gone.pop(key) for key in sorted(self._gone.keys() & keys)}
        while len(old := [number for number in self._steps if number]) > 2 and self.nbytes > self._keep_bytes:
            self._gone.update(dict.fromkeys(self._steps.pop(old[0]).keys, old[0]))
        while len(self._gone) > _KEEP_KEYS:
            self._gone.pop(next(iter(self._gone)))

    def lose(self, global_steps: int) -> None:
        """Leave a step out: some of its rows are missing."""
        self._steps.pop(global_steps, None)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows kept, step 0 apart."""
        return sum(step.nbytes for number, step in self._steps.items() if number)

    def rows(self, global_steps: int) -> list[pa.RecordBatch]:
        """The rows a step is judged among, in the order they came, its own included."""
        keys = self.keys(global_steps)
        among = beside(list(self._steps), (global_steps,), lambda number: not keys.isdisjoint(self._steps[number].keys))
        return [batch for number in among for batch in self._steps[number].batches]

    def keys(self, global_steps: int) -> set[str]:
        """Trajectory and prompt keys in a step."""
        return self._steps[global_steps].keys

    def forgotten(self, global_steps: int) -> dict[str, int]:
        """Keys of the step that were in an earlier one whose rows are no longer kept, and which that was."""
        return self._steps[global_steps].forgotten


def keys_of(batch: pa.RecordBatch) -> set[str]:
    """The trajectory and prompt keys in these rows."""
    lists = batch.column("key").filter(pc.is_in(batch.column("entity"), value_set=_ENTITIES))
    flat = lists.flatten()
    if pa.types.is_dictionary(flat.type):
        return set(flat.dictionary.take(pc.unique(flat.indices).drop_null()).to_pylist())
    return set(flat.drop_null().to_pylist())
