"""Step numbers, kept as runs of equal stride: small however long the training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


class Steps:
    """Step numbers in the order they came.

    Attributes:
        ranges: first, last and stride of each run: ``1 2 3 7`` is ``[[1, 3, 1], [7, 7, 1]]``.
    """

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        self.ranges: list[list[int]] = [list(one) for one in ranges]

    @classmethod
    def of(cls, steps: Iterable[int]) -> Steps:
        """These steps, in this order."""
        made = cls()
        for step in steps:
            made.append(step)
        return made

    def append(self, step: int) -> None:
        """Add a step; the one that came last is not added again."""
        if self.ranges:
            first, last, stride = self.ranges[-1]
            if step == last:
                return
            if step > last and (first == last or step - last == stride):
                self.ranges[-1][1:] = [step, step - last]
                return
        self.ranges.append([step, step, 1])

    def without(self, others: Steps) -> Steps:
        """The steps that are not among the others."""
        return Steps.of(step for step in self if step not in others)

    def __contains__(self, step: int) -> bool:
        return any(first <= step <= last and (step - first) % stride == 0 for first, last, stride in self.ranges)

    def __iter__(self) -> Iterator[int]:
        for first, last, stride in self.ranges:
            yield from range(first, last + 1, stride)

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Steps) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]
