"""The ranks of the data-parallel group, and which of them this process plays.

The embedded trainer plays all of them in turn; a process of a distributed run plays one, and knows of the others what
it gathers. What is written by these terms serves both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """A data-parallel group as one process sees it.

    Attributes:
        size: ranks of the group, as the engine reports it.
        played: the ranks this process plays, rising.
        group: process group of all of them, which can gather objects on the host; None where one process plays all.
    """

    size: int
    played: Sequence[int]
    group: Any = None

    @classmethod
    def embedded(cls, size: int) -> Ranks:
        """All ranks in one process."""
        return cls(size, range(size))

    @classmethod
    def of_process(cls, group: Any = None) -> Ranks:
        """One rank: that of this process in an initialised process group.

        Args:
            group: None takes the default group.
        """
        group = group or dist.group.WORLD
        return cls(dist.get_world_size(group), [dist.get_rank(group)], group)

    @property
    def first(self) -> bool:
        """This process plays the first rank: it records what every rank would say alike."""
        return 0 in self.played

    @property
    def place(self) -> dict[str, Any]:
        """Context of a trace row on the rows that this process holds: which rank's they are, where it plays one."""
        return {} if self.group is None else {"coord": {"dp": self.played[0]}}

    def gathered(self, value: T) -> list[T]:
        """Every process's value, in the order of their ranks; a collective, so all of them must ask."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def agreed(self, flag: bool) -> bool:
        """True when every process says so: what is a collective may hang on no process's own opinion."""
        return all(self.gathered(flag))
