"""A batch as training workers see it in TransferQueue: global indexes (slots), no keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class BatchMeta:
    """Rows by slot.

    Attributes:
        global_indexes: slots of the rows; a slot is reused after its key is cleared.
        partition_ids: partition of each row.
        field_names: fields that every row has now.
        custom_meta: tag of each row.
        extra_info: facts of the whole batch.
    """

    global_indexes: tuple[int, ...]
    partition_ids: tuple[str, ...]
    field_names: tuple[str, ...] = ()
    custom_meta: tuple[dict[str, Any], ...] = ()
    extra_info: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.global_indexes)

    @property
    def is_ready(self) -> bool:
        """True when there is a field that every row has."""
        return bool(self.global_indexes and self.field_names)

    def select_fields(self, names: Sequence[str]) -> BatchMeta:
        """The named fields in the order asked; a name that not every row has is left out, silently."""
        return replace(self, field_names=tuple(name for name in names if name in self.field_names))

    def chunk(self, chunks: int) -> list[BatchMeta]:
        """``chunks`` parts in order, the first ones one row longer when it does not divide."""
        base, longer = divmod(self.size, chunks)
        parts, start = [], 0
        for part in range(chunks):
            rows = slice(start, start + base + (part < longer))
            parts.append(
                replace(
                    self,
                    global_indexes=self.global_indexes[rows],
                    partition_ids=self.partition_ids[rows],
                    custom_meta=self.custom_meta[rows],
                )
            )
            start = rows.stop
        return parts
