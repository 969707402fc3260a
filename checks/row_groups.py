"""What the digest reads: row groups, of a Parquet file or of a step still in memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lineage.checks.flat import Int64
from lineage.traces.errors import reading


class RowGroups(Protocol):
    """A source of row groups.

    Attributes:
        number: of the source among the others, for the ids of its rows.
        first_row: of each row group, and one past the last.
    """

    number: int
    first_row: Int64

    def facts(self) -> int:
        """Elements of all rows, by the footer alone: a row without elements counts for one."""
        ...

    def read(self, group: int, columns: Sequence[str] | None = None) -> pa.Table:
        """A row group, or at least these columns of it, as far as they are stored."""
        ...


def row_groups(sources: Sequence[Path | pa.RecordBatch], columns: Sequence[str]) -> list[RowGroups]:
    """The row groups of the files or batches of one trace.

    Args:
        sources: where they lie.
        columns: those ever wanted.

    Raises:
        TraceError: a file cannot be read.
    """
    return [
        _File(number, source, columns) if isinstance(source, Path) else _Batch(number, source, columns)
        for number, source in enumerate(sources)
    ]


class _Batch:
    """A record batch in memory: one row group."""

    def __init__(self, number: int, batch: pa.RecordBatch, columns: Sequence[str]) -> None:
        self.number = number
        self.first_row = np.array([0, batch.num_rows])
        stored = set(batch.schema.names)
        self._table = pa.Table.from_batches([batch]).select([name for name in columns if name in stored])

    def facts(self) -> int:
        return len(self._table["key"].combine_chunks().values) if "key" in self._table.column_names else 0

    def read(self, group: int, columns: Sequence[str] | None = None) -> pa.Table:
        return self._table


class _File:
    """One file's metadata, read once: parsing the footer for every row group would cost more than the data."""

    def __init__(self, number: int, path: Path, columns: Sequence[str]) -> None:
        self.number, self.path = number, path
        self._open = threading.local()
        with reading(path):
            self.metadata = pq.read_metadata(path)
            stored = set(self.metadata.schema.to_arrow_schema().names)
        self.columns = [name for name in columns if name in stored]
        counts = [self.metadata.row_group(group).num_rows for group in range(self.metadata.num_row_groups)]
        self.first_row = np.concatenate([[0], np.cumsum(counts)])

    def facts(self) -> int:
        schema = self.metadata.schema
        keys = next((at for at in range(len(schema)) if schema.column(at).path.startswith("key.")), None)
        groups = map(self.metadata.row_group, range(self.metadata.num_row_groups))
        return 0 if keys is None else sum(int(group.column(keys).num_values) for group in groups)

    def read(self, group: int, columns: Sequence[str] | None = None) -> pa.Table:
        dictionaries = [f"{name}.list.element" for name in ("key", "status", "reason") if name in self.columns]
        wanted = self.columns if columns is None else [name for name in columns if name in self.columns]
        with reading(self.path):
            # One reader per thread: opening the file again for each row group costs as much as reading it.
            file = getattr(self._open, "file", None)
            if file is None:
                file = self._open.file = pq.ParquetFile(
                    self.path, metadata=self.metadata, read_dictionary=dictionaries, page_checksum_verification=True
                )
            return file.read_row_group(group, columns=wanted, use_threads=False)
