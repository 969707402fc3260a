"""One side of a comparison: its row groups, which steps lie in them, and the values of a few of its elements."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lineage.traces.diff.facts import READ, Facts, Places, facts_of, joined
from lineage.traces.diff.hashing import COLUMN, Int64, Lists, Scalars, UInt64, distinct
from lineage.traces.errors import TraceError, reading
from lineage.traces.source import locate
from lineage.traces.trace import row_ids

_LIGHT = ("global_steps", "n", "key", "stage", "process")
_DICTIONARIES = ("key", "status", "finish_reason", "reason", "data_source", "role")


class Side:
    """A trace that is compared. Use it as a context manager.

    Attributes:
        source: where it lies and what it says of itself.
        facts: of each step, how many it has; -1 stands for rows without a step.
        rows: how many rows it has.
        stages: of each step, its stages.
        processes: who wrote it.

    Raises:
        TraceError: it cannot be read, or has rows of several runs.
    """

    def __init__(self, path: str | Path) -> None:
        self.source = locate(path)
        try:
            runs = self.source.runs
            if len(runs) > 1:
                named = ", ".join(sorted(run.run_id for run in runs)[:4])
                raise TraceError(f"{path}: rows of {len(runs)} runs ({named}): name the files of one run to compare it")
            self.facts: dict[int, int] = {}
            self.stages: dict[int, set[str]] = {}
            self.processes: set[str] = set()
            self.rows = 0
            self._groups: list[tuple[int, int, int, frozenset[int]]] = []  # file, row group, first row, steps
            with reading(self.source.path):
                self._metadata = [pq.read_metadata(file) for file in self.source.files]
                for number, metadata in enumerate(self._metadata):
                    self._look(number, metadata)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove what was made to read it."""
        if self.source.temporary is not None:
            shutil.rmtree(self.source.temporary, ignore_errors=True)

    def __enter__(self) -> Side:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def read(self, steps: Sequence[int], places: Places, pool: ThreadPoolExecutor) -> Facts | None:
        """The facts of some steps, their rows in event order; None without any."""
        wanted = set(steps)
        groups = [group for group in self._groups if not wanted.isdisjoint(group[3])]
        parts = [part for part in pool.map(partial(self._facts, places=places, wanted=wanted), groups) if part]
        return joined(parts).ordered(len(self.processes) > 1) if parts else None

    def keys(self) -> UInt64:
        """Hashes of all trajectory keys and uids of the trace."""
        found = [np.empty(0, np.uint64)]
        for number, group, _, _ in self._groups:
            table = self._table(number, group, ("entity", "key", "n"))
            keyed = pc.is_in(table["entity"].cast(pa.string()), pa.array(["trajectory", "prompt"]))
            hashes = Lists(table.filter(keyed)).hashed("key")
            if hashes is not None:
                found.append(distinct(hashes))
        return distinct(np.concatenate(found))

    def values(
        self, wanted: Iterable[tuple[int, int]], columns: Sequence[str]
    ) -> dict[tuple[int, int], dict[str, Any]]:
        """What elements say in some columns.

        Args:
            wanted: row id and element (from 1; others have no lists) of each.
            columns: their names.
        """
        found: dict[tuple[int, int], dict[str, Any]] = {}
        left = sorted(set(wanted))
        for number, group, first, _ in self._groups:
            ids = row_ids(number, first, self._metadata[number].row_group(group).num_rows)
            here = [one for one in left if ids[0] <= one[0] <= ids[-1]] if len(ids) else []
            if not here:
                continue
            table = self._table(number, group, columns)
            for rid, at in here:
                row: dict[str, Any] = {}
                for name in table.column_names:
                    cell = table[name][rid - int(ids[0])]
                    if COLUMN[name].listed and name != "missing":
                        inside = cell.is_valid and 0 < at <= len(cell.values)
                        row[name] = cell.values[at - 1].as_py() if inside else None
                    else:
                        row[name] = cell.as_py()
                found[rid, at] = row
        return found

    def _look(self, number: int, metadata: pq.FileMetaData) -> None:
        first = 0
        counted = "n" in metadata.schema.to_arrow_schema().names
        for group in range(metadata.num_row_groups):
            table = self._table(number, group, [name for name in _LIGHT if name != "key" or not counted])
            scalars = Scalars(table)
            steps = scalars.integers("global_steps", -1)
            counts = Lists(table).n
            for step, stage in set(zip(steps.tolist(), scalars.texts("stage"), strict=True)):
                self.stages.setdefault(step, set()).add(stage)
            self.processes.update(scalars.texts("process"))
            distinct, which = np.unique(steps, return_inverse=True)
            sums = np.bincount(which, np.maximum(counts, 1), len(distinct)).astype(np.int64)
            for step, count in zip(distinct.tolist(), sums.tolist(), strict=True):
                self.facts[step] = self.facts.get(step, 0) + count
            self._groups.append((number, group, first, frozenset(distinct.tolist())))
            self.rows += table.num_rows
            first += table.num_rows

    def _facts(self, group: tuple[int, int, int, frozenset[int]], places: Places, wanted: set[int]) -> Facts | None:
        number, at, first, steps = group
        table = self._table(number, at, READ)
        rids: Int64 = row_ids(number, first, table.num_rows)
        with reading(self.source.files[number]):
            if not steps <= wanted:
                inside = np.isin(Scalars(table).integers("global_steps", -1), list(wanted))
                table, rids = table.filter(pa.array(inside)), rids[inside]
            return facts_of(table, rids, places) if table.num_rows else None

    def _table(self, number: int, group: int, columns: Sequence[str]) -> pa.Table:
        path = self.source.files[number]
        stored = set(self._metadata[number].schema.to_arrow_schema().names)
        with reading(path):
            file = pq.ParquetFile(
                path,
                metadata=self._metadata[number],
                read_dictionary=[f"{name}.list.element" for name in _DICTIONARIES if name in stored],
            )
            wanted = [name for name in dict.fromkeys(columns) if name in stored]
            return file.read_row_group(group, columns=wanted, use_threads=False)
