"""The ranks of the data-parallel group, and which of them this process plays.

The embedded trainer plays all of them in turn; a process of a distributed run plays one, and knows of the others what
it gathers. What is written by these terms serves both. Where sequences are shared out, several processes play one rank
together: they hold the same rows, and one of them speaks for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from lineage.trainer.engine.ulysses import SequenceParallel

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """A data-parallel group as one process sees it.

    Attributes:
        size: ranks of the group, as the engine reports it.
        played: the ranks this process plays, rising.
        group: process group of one process a rank, which can gather objects on the host; None where one plays all.
        sequence: the processes that play this rank together, each a slice of every sequence; None where it is one.
    """

    size: int
    played: Sequence[int]
    group: Any = None
    sequence: SequenceParallel | None = None

    @classmethod
    def embedded(cls, size: int) -> Ranks:
        """All ranks in one process."""
        return cls(size, range(size))

    @classmethod
    def of_process(cls, sp: int = 1) -> Ranks:
        """The rank of this process in the default process group; a collective, so all of them must ask.

        Args:
            sp: processes that play one rank together, which have neighbouring numbers
                (``ulysses_sequence_parallel_size``).
        """
        world, number = dist.get_world_size(), dist.get_rank()
        if sp == 1:
            return cls(world, [number], dist.group.WORLD)
        replicas = [dist.new_group(list(range(first, first + sp))) for first in range(0, world, sp)]
        peers = [dist.new_group(list(range(place, world, sp))) for place in range(sp)]
        rank, place = divmod(number, sp)
        return cls(world // sp, [rank], peers[place], SequenceParallel(sp, place, replicas[rank]))

    @property
    def first(self) -> bool:
        """This process speaks for the first rank: it records what every rank would say alike."""
        return 0 in self.played and self.speaks

    @property
    def speaks(self) -> bool:
        """Of the processes that play its rank this one puts and records what they have alike."""
        return self.sequence is None or self.sequence.rank == 0

    @property
    def world_rank(self) -> int:
        """Number of this process among all."""
        return self.played[0] if self.sequence is None else self.played[0] * self.sequence.size + self.sequence.rank

    @property
    def world(self) -> Any:
        """Process group of all that hold the model together; None where one process does."""
        return self.group if self.sequence is None else dist.group.WORLD

    def coord(self, rank: int) -> dict[str, int]:
        """Where the rows of a rank are that is played here, as a trace row says it."""
        return {"dp": rank} if self.sequence is None else {"dp": rank, "sp": self.sequence.rank}

    @property
    def place(self) -> dict[str, Any]:
        """Context of a trace row on the rows that this process holds: which rank's they are, where it plays one."""
        return {} if self.group is None else {"coord": self.coord(self.played[0])}

    def gathered(self, value: T) -> list[T]:
        """A value from every rank, in their order; a collective, so all of them must ask."""
        return _gathered(value, self.group)

    def gathered_from_all(self, value: T) -> list[T]:
        """Every process's value, in the order of their numbers; a collective, so all of them must ask."""
        return _gathered(value, self.world)

    def spoken(self, values: Sequence[T]) -> list[T]:
        """Of the values of :meth:`gathered_from_all` those of the processes that speak, one a rank."""
        return list(values[:: 1 if self.sequence is None else self.sequence.size])

    def agreed(self, flag: bool) -> bool:
        """True when every process says so: what is a collective may hang on no process's own opinion."""
        return all(self.gathered_from_all(flag))


def _gathered(value: T, group: Any) -> list[T]:
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
