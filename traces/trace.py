"""A trace as DuckDB views: ``rows`` as stored, ``facts`` one per element, and what follows from them."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np
import pyarrow as pa
from duckdb import DuckDBPyConnection, DuckDBPyRelation
from numpy.typing import NDArray

from lineage.schema import COLUMNS, schema
from lineage.traces import fence, functions
from lineage.traces.damage import culprit
from lineage.traces.errors import TraceError, reading
from lineage.traces.interrupts import interruptible
from lineage.traces.source import Source, locate
from lineage.traces.state import State

if TYPE_CHECKING:
    import pandas as pd

VIEWS = ("rows", "facts", "trajectories", "groups", "steps")
_VIEWS = Path(__file__).parent / "views"
# DuckDB's errors that are of what was asked; others are of what was read.
_OF_THE_QUERY = (duckdb.ProgrammingError, duckdb.DataError, duckdb.NotSupportedError, duckdb.PermissionException)
# Optimizers that pay on millions of rows only.
_COSTLY = frozenset(
    {
        "build_side_probe_side", "common_subplan", "cte_filter_pusher", "join_filter_pushdown", "join_order",
        "late_materialization", "statistics_propagation", "window_self_join",
    }
)  # fmt: skip
# Files no larger than this hold few rows.
_SMALL = 1 << 20
_SOURCE_BITS = 40  # of a row's id, below the number of its file or batch


class Trace:
    """An open trace. Use it as a context manager, or close it.

    Queries run inside DuckDB's own fence: they read this trace and nothing else.
    """

    def __init__(
        self, source: Source, threads: int | None = None, memory_limit: str | None = None, views: bool = True
    ) -> None:
        self.source = source
        #: rows of a trace that lies in memory; empty for one of files
        self.batches: tuple[pa.RecordBatch, ...] = ()
        self._remove = (
            weakref.finalize(self, shutil.rmtree, source.temporary, True) if source.temporary is not None else None
        )
        self._con = duckdb.connect()
        self._con.execute("set enable_progress_bar=false")  # else `python -c` and notebooks get one between our lines
        if threads:
            self._con.execute(f"set threads={int(threads)}")
        if memory_limit:
            self._con.execute("set memory_limit=?", [memory_limit])
        self._con.execute("set preserve_insertion_order=true")
        self._con.execute("set parquet_metadata_cache=true")  # every view binds the reader again
        with suppress(duckdb.CatalogException):  # DuckDB before it had the setting: x / 0 was null
            self._con.execute("set error_on_division_by_zero=false")
        self._prepare()
        functions.register(self._con)
        self._fence()
        try:
            with reading(source.path):
                self._make_views(VIEWS if views else ("rows", "facts"))
        except BaseException:
            self.close()
            raise
        self._con.execute("set lock_configuration=true")

    # -- what it says of itself --------------------------------------------------------------------------------

    @property
    def path(self) -> Path | str:
        """What the trace was opened with; text where it is a URL."""
        return self.source.path

    @property
    def state(self) -> State:
        """Whether the trace is complete: closed, torn steps, dropped rows."""
        return self.source.state

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the run recorded of itself: ``run`` (ids, versions, hashes, profile) and ``config``."""
        return {"run": dict(self.source.run), "config": dict(self.source.config)}

    @property
    def absent(self) -> frozenset[str]:
        """Columns of the schema this trace does not hold; in the views they are typed nulls."""
        return self.source.absent

    @property
    def profile(self) -> str:
        """The trainer's profile: ``lineage``, ``verl``, ``trl`` ..."""
        return str(self.source.run.get("profile", "lineage"))

    # -- asking ------------------------------------------------------------------------------------------------

    @property
    def connection(self) -> DuckDBPyConnection:
        """The fenced DuckDB connection that holds the views."""
        return self._con

    @property
    def rows(self) -> DuckDBPyRelation:
        """Rows as stored."""
        return self._con.view("rows")

    @property
    def facts(self) -> DuckDBPyRelation:
        """One row per element of every row; ``i`` counts from 1."""
        return self._con.view("facts")

    @property
    def trajectories(self) -> DuckDBPyRelation:
        """One row per (step, trajectory key)."""
        return self._con.view("trajectories")

    @property
    def groups(self) -> DuckDBPyRelation:
        """One row per (step, uid)."""
        return self._con.view("groups")

    @property
    def steps(self) -> DuckDBPyRelation:
        """One row per step."""
        return self._con.view("steps")

    def sql(self, query: str) -> DuckDBPyRelation:
        """Run SQL over the views.

        Raises:
            TraceError: it is not a query, is not valid, or asks for something outside this trace.
        """
        with self._asking():
            return self._con.sql(fence.query(self._con, query))

    def df(self, query: str) -> pd.DataFrame:
        """Run SQL over the views and return a pandas DataFrame.

        Raises:
            TraceError: as :meth:`sql`, or the query failed while it ran.
        """
        with self._asking():
            frame: pd.DataFrame = self.sql(query).df()
            return frame

    def fetch(self, query: str) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Run SQL over the views and return the names of the columns, and the rows.

        Raises:
            TraceError: as :meth:`df`.
        """
        with self._asking():
            relation = self.sql(query)
            return list(relation.columns), relation.fetchall()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """What the fence or DuckDB refused, as an error of this trace; Ctrl-C stops the query."""
        try:
            with interruptible(self._con), fence.asking():
                yield
        except fence.FenceError as error:
            if isinstance(error.__cause__, duckdb.Error) and not isinstance(error.__cause__, _OF_THE_QUERY):
                raise TraceError(f"{self.path}: cannot be read: {culprit(self.path)}{error}") from error
            beyond = "; a query reads this trace and no other file" if error.outside else ""
            raise TraceError(f"sql: {error}{beyond}") from error

    def close(self) -> None:
        """Release the connection, and the temporary file that parts were read through."""
        self._con.close()
        if self._remove is not None:
            self._remove()

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    # -- making ------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Further settings of the connection, before they are locked."""
        with suppress(OSError):  # who reads it says what is wrong
            if sum(file.stat().st_size for file in self.source.files) <= _SMALL:
                plan_quickly(self._con)

    def _fence(self) -> None:
        fence.prepare(self._con)
        names = [str(file.resolve()) for file in self.source.files]
        self._con.execute(f"set allowed_paths=[{', '.join(map(_quote, names))}]")
        self._con.execute("set enable_external_access=false")

    def _make_views(self, views: Sequence[str]) -> None:
        self._con.register("schema_v1", schema().empty_table())
        described = self._con.sql("describe select * from schema_v1").fetchall()
        types = {str(name): str(type_) for name, type_, *_ in described}
        self._con.unregister("schema_v1")
        reader, rid = self._reader()
        found = self._con.sql(f"describe select * from {reader}").fetchall()
        stored = {str(name): str(type_) for name, type_, *_ in found}
        columns = [_column(column.name, types[column.name], stored.get(column.name)) for column in COLUMNS]
        extra = [_name(name) for name in self.source.stored if name not in types]
        self._con.execute(f"create view stored as select {rid} as rid, {', '.join(columns + extra)} from {reader}")
        self._con.execute('create view "rows" as select * exclude (rid) from stored')
        self._con.execute(f"create view facts as {facts_of(_name('rows'))}")
        for name in views[2:]:
            self._con.execute((_VIEWS / f"{name}.sql").read_text("utf-8"))

    def _reader(self) -> tuple[str, str]:
        """What the rows are read from, and the row id in it, as SQL."""
        files = [str(file.resolve()) for file in self.source.files]
        reader = (
            f"read_parquet([{', '.join(map(_quote, files))}], union_by_name=true, filename=true, file_row_number=true)"
        )
        return reader, _rid(files)


def plan_quickly(con: DuckDBPyConnection) -> None:
    """Few rows are asked hundreds of questions: the optimizer would take longer than what it saves."""
    known = {str(name) for (name,) in con.execute("select name from duckdb_optimizers()").fetchall()}
    con.execute(f"set disabled_optimizers='{','.join(sorted(known & _COSTLY))}'")


def row_ids(source: int, first: int, count: int) -> NDArray[np.int64]:
    """Ids of ``count`` rows from the ``first`` on of a file or batch: its number, and the row's number in it."""
    return (source << _SOURCE_BITS) + np.arange(first, first + count)


def open_trace(
    path: str | Path, threads: int | None = None, memory_limit: str | None = None, views: bool = True
) -> Trace:
    """Open a trace: a Parquet file, a run folder, a folder of parts, a glob, or a URL of one (``s3://bucket/run``).

    Args:
        path: where the trace lies.
        threads: DuckDB threads; all cores when None.
        memory_limit: DuckDB's limit, such as ``"1GB"``.
        views: make ``trajectories``, ``groups`` and ``steps`` too; a checker has no use for them.

    Raises:
        TraceError: one line that says what is wrong with the path.
    """
    return Trace(locate(path), threads, memory_limit, views)


def facts_of(relation: str, extra: str = "") -> str:
    """SQL that turns rows of ``relation`` into facts, one per element.

    An index is unnested and every list is read at it, so that DuckDB reads only the lists a query names: unnesting
    the lists themselves side by side is 2.5 times slower.
    """
    named = [
        f"{_name(column.name)}[i] as {_name(column.name)}" if column.listed else _name(column.name)
        for column in COLUMNS
    ]
    return (
        f"select {extra}i, {', '.join(named)} "
        f"from (select *, unnest(range(1, cast(n as bigint) + 1)) as i from {relation})"
    )


def _column(name: str, wanted: str, stored: str | None) -> str:
    if stored is None:
        return f"cast(null as {wanted}) as {_name(name)}"
    if stored != wanted:
        return f"cast({_name(name)} as {wanted}) as {_name(name)}"
    return _name(name)


def _rid(names: list[str]) -> str:
    """Row id: the file's number and the row's number in it, so that a reader of the files can name a row too."""
    if len(names) == 1:
        return "file_row_number"
    return f"(list_position([{', '.join(map(_quote, names))}], filename) - 1) * {1 << _SOURCE_BITS} + file_row_number"


def _name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
