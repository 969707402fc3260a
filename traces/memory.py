"""A trace in memory: the steps a recorder has just sealed, asked like a trace on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from lineage.traces.source import Source
from lineage.traces.state import State
from lineage.traces.trace import Trace, plan_quickly, row_ids

_ROWS, _RID = "memory_rows", "memory_rid"


class MemoryTrace(Trace):
    """A trace of record batches, whose rows can be replaced by others: one connection serves a whole run.

    Args:
        schema: of the batches.
        run: what the run says of itself: its id and profile.
        config: the resolved configuration.
        name: stands for the path.
        threads: as for :func:`lineage.traces.open_trace`.
    """

    def __init__(
        self,
        schema: pa.Schema,
        *,
        run: Mapping[str, Any],
        config: Mapping[str, Any],
        name: str = "memory",
        threads: int | None = None,
    ) -> None:
        fields = [field.with_type(_decoded(field.type)) for field in schema]
        self._schema = pa.schema([*fields, pa.field(_RID, pa.int64())])
        stored = {field.name: field.type for field in schema}
        super().__init__(Source(Path(name), (), stored, run, config, State()), threads, views=False)

    def show(self, batches: Sequence[pa.RecordBatch]) -> None:
        """Let the trace be these rows."""
        self.batches = tuple(batches)
        parts = []
        for number, batch in enumerate(batches):
            columns = [column.cast(_decoded(column.type)) for column in batch.columns]
            rids = pa.array(row_ids(number, 0, batch.num_rows))
            parts.append(pa.RecordBatch.from_arrays([*columns, rids], schema=self._schema))
        self._con.register(_ROWS, pa.Table.from_batches(parts, self._schema))

    def _prepare(self) -> None:
        plan_quickly(self._con)

    def _reader(self) -> tuple[str, str]:
        self.show(())
        return _ROWS, _RID


def _decoded(type_: pa.DataType) -> pa.DataType:
    """A type without dictionaries: DuckDB 1.2 reads those of one batch's lists with another's."""
    if pa.types.is_list(type_) and pa.types.is_dictionary(type_.value_type):
        return pa.list_(type_.value_type.value_type)
    return type_
