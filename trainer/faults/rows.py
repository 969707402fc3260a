"""The rows of a recorded trace, to be edited: for faults no change of the trainer could express."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]

_CONFIG = b"lineage.config"  # the file's own metadata: the resolved configuration


class TraceRows:
    """All rows of a trace file, as dictionaries by column.

    Attributes:
        rows: in the order of the file; a listed column is a list or None.
    """

    def __init__(self, path: Path) -> None:
        table = pq.read_table(path)
        self._schema = table.schema
        # what the run said of itself is in the file's own metadata: a schema holds a part of it
        said = pq.read_metadata(path).metadata or {}
        self._metadata = {name: value for name, value in said.items() if name != b"ARROW:schema"}
        self.rows: list[Row] = table.to_pylist()

    def where(self, **wanted: Any) -> Iterator[Row]:
        """Rows with these values, e.g. ``where(global_steps=2, stage="advantage", field="advantages")``."""
        for row in self.rows:
            if all(row[name] == value for name, value in wanted.items()):
                yield row

    def one(self, **wanted: Any) -> Row:
        """The first of :meth:`where`.

        Raises:
            LookupError: there is none.
        """
        for row in self.where(**wanted):
            return row
        raise LookupError(f"no row with {wanted}")

    def configure(self, name: str, value: Any) -> None:
        """Let the run say another setting, by its dotted name."""
        config = json.loads(self._metadata[_CONFIG])
        *path, last = name.split(".")
        table = config
        for part in path:
            table = table.setdefault(part, {})
        table[last] = value
        self._metadata[_CONFIG] = json.dumps(config).encode()

    def write(self, path: Path) -> None:
        """Write them as a trace file with the metadata they came with."""
        with pq.ParquetWriter(path, self._schema, compression="zstd", write_page_checksum=True) as writer:
            writer.write_table(pa.Table.from_pylist(self.rows, self._schema))
            writer.add_key_value_metadata(self._metadata)
