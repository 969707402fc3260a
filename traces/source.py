"""Where a trace lies: a file, a folder, a glob or a URL becomes Parquet files and what they say of themselves."""

from __future__ import annotations

import glob
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lineage.compact import PartsGone, materialise
from lineage.errors import first_line
from lineage.parts import OPEN_SUFFIX, PARTS, SEALED_SUFFIX, parts_folder
from lineage.run import TRACE_FILE
from lineage.schema import COLUMNS, META_CONFIG, META_RUN, META_SEGMENT, META_STATE, META_VERSION, SCHEMA_VERSION
from lineage.segments import trace_files
from lineage.state import run_state
from lineage.traces.columns import unfit
from lineage.traces.damage import Damaged, Pages, verify
from lineage.traces.errors import TraceError, reading
from lineage.traces.remote_files import fetch, is_remote
from lineage.traces.state import State, merge, read_state

_IDENTITY = ("global_steps", "stage", "op", "field")
_TRIES = 20  # a run compacts once; the rest is for a run that is started again at once


@dataclass(frozen=True)
class Run:
    """What the files with rows of one run say of it.

    Attributes:
        run_id: as its rows have it; empty where they have none.
        config: its resolved configuration.
        profile: its trainer's profile; empty where they do not say.
        files: where its rows lie.
    """

    run_id: str
    config: Mapping[str, Any]
    profile: str = ""
    files: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Source:
    """Parquet files of one trace, the columns they hold and their metadata.

    Attributes:
        path: what was asked for; text where it is a URL.
        files: the files, on this machine.
        stored: Arrow type of each column they hold.
        run: what the run says of itself.
        config: its resolved configuration.
        state: what is missing.
        runs: the runs there are rows of; empty where that is not known before they are read. ``run`` and ``config`` are
            those of the first that says something.
        unseen: run and step of what cannot be judged, because some of its rows are missing.
        pages: how many of the files' pages are known to be as they were written.
        temporary: the folder to remove when the trace is closed: parts, and what lies elsewhere, are read through it.
    """

    path: Path | str
    files: tuple[Path, ...]
    stored: Mapping[str, pa.DataType]
    run: Mapping[str, Any]
    config: Mapping[str, Any]
    state: State
    runs: tuple[Run, ...] = ()
    unseen: frozenset[tuple[str, int]] = frozenset()
    pages: Pages = field(default_factory=Pages)
    temporary: Path | None = None

    @cached_property
    def absent(self) -> frozenset[str]:
        """Columns of the schema this trace does not hold."""
        return frozenset(column.name for column in COLUMNS) - frozenset(self.stored)


def locate(path: str | Path) -> Source:
    """Find and validate the files of a trace.

    Args:
        path: a Parquet file, a run folder, a folder of parts, or a glob of those; or a URL of one, ``s3://bucket/run``,
            in any protocol fsspec knows.

    Raises:
        TraceError: nothing there, not a trace, empty, damaged, or from a newer schema.
    """
    if isinstance(path, str) and not path.strip():
        raise TraceError("no trace is named: the path is empty (a variable that is not set?)")
    target = path if isinstance(path, str) and is_remote(path) else Path(path)
    for last in (False,) * _TRIES + (True,):
        search = _Search()
        try:
            with reading(path):
                search.look(target)
                return _described(target, search.files, search.temporary)
        except PartsGone as gone:  # the run has closed: its trace is in other files now
            search.remove()
            if last:
                raise TraceError(str(gone)) from gone
        except BaseException:
            search.remove()
            raise
    raise AssertionError


class _Search:
    """Collects the Parquet files of a trace, each once, and makes those that are needed in a temporary folder."""

    def __init__(self) -> None:
        self.files: list[Path] = []
        self.temporary: Path | None = None
        self._seen: set[Path] = set()

    def look(self, target: Path | str) -> None:
        """Add the files of a path, a glob or a URL."""
        if isinstance(target, str):
            copies = fetch(target, self._room())
            if not copies:
                said = "no file matches" if glob.has_magic(target) else "no such file or folder"
                raise TraceError(f"{target}: {said}")
            for copy in copies:
                self._add(copy)
        elif target.exists():
            self._add(target)
        elif glob.has_magic(str(target)):
            found = sorted(glob.glob(str(target)))
            if not found:
                raise TraceError(f"{target}: no file matches")
            for name in found:
                self._add(Path(name))
        elif target.name == PARTS and trace_files(target.parent):
            self._add(target.parent)  # they have just been compacted
        else:
            raise TraceError(f"{target}: no such file or folder{_hint(target)}")

    def remove(self) -> None:
        """Remove what was made."""
        if self.temporary is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)

    def _add(self, path: Path) -> None:
        if path.name.endswith((SEALED_SUFFIX, OPEN_SUFFIX)):
            path = path.parent  # a part alone says little: all the parts beside it are read
        real = path.resolve()
        if real in self._seen:
            return
        self._seen.add(real)
        if not path.is_dir():
            self.files.append(path)
        elif finished := trace_files(path):
            for file in finished:
                self._add(file)
        elif parts_folder(path) is not None:
            self.files.append(self._materialised(path))
        else:
            found = sorted(path.glob("*.parquet"))
            if not found:
                state = read_state(run_state(path / PARTS))
                if state.live:
                    raise TraceError(_too_early(path, state))
                looked = f"{TRACE_FILE}, *.parquet and *{SEALED_SUFFIX} parts"
                raise TraceError(f"{path}: no trace in this folder (looked for {looked})")
            for file in found:
                self._add(file)

    def _materialised(self, folder: Path) -> Path:
        """The one seam to the recorder's parts: a temporary Parquet file with full metadata."""
        try:
            return materialise(folder, self._room())
        except (OSError, pa.ArrowException) as error:
            raise TraceError(f"{folder}: its parts cannot be read ({first_line(error)})") from error

    def _room(self) -> Path:
        """A new folder within the temporary one."""
        if self.temporary is None:
            self.temporary = Path(tempfile.mkdtemp(prefix="lineage-"))
        room = self.temporary / str(len(list(self.temporary.iterdir())))
        room.mkdir()
        return room


def _described(target: Path | str, files: list[Path], temporary: Path | None) -> Source:
    footers = [_footer(file) for file in files]
    pages = sum((_pages(footer, file) for footer, file in zip(footers, files, strict=True)), Pages())
    schemas = [_schema(footer, file) for footer, file in zip(footers, files, strict=True)]
    stored: dict[str, pa.DataType] = {}
    for arrow in schemas:
        stored |= {column.name: column.type for column in arrow if column.name not in stored}
    missing = [name for name in _IDENTITY if name not in stored]
    if missing:
        raise TraceError(f"{files[0]}: Parquet, but not a lineage trace (no column {', '.join(missing)})")
    said = [_Said.of(footer, file) for footer, file in zip(footers, files, strict=True)]
    # The segments of one trace all say the same, which counts once.
    state = merge(list({one.plan: one.state for one in said}.values()))
    if sum(footer.num_rows for footer in footers) == 0:
        if state.live:
            raise TraceError(_too_early(target, state))
        raise TraceError(f"{target}: the trace is empty (0 rows); was tracing on? see trace.enabled")
    run = next((one.run for one in said if one.run), {})
    config = next((one.config for one in said if one.config), {})
    runs, unseen = _runs(footers, said, files)
    return Source(target, tuple(files), stored, run, config, state, runs, unseen, pages, temporary)


@dataclass(frozen=True)
class _Said:
    """What one file's metadata says."""

    run: Mapping[str, Any]
    config: Mapping[str, Any]
    state: State
    plan: str

    @classmethod
    def of(cls, footer: pq.FileMetaData, file: Path) -> _Said:
        meta = footer.metadata or {}
        try:
            state = read_state(_json(meta, META_STATE, file))
        except (ValueError, TypeError, AttributeError) as error:
            raise TraceError(f"{file}: metadata {META_STATE.decode()} is no state ({first_line(error)})") from error
        plan = str(_json(meta, META_SEGMENT, file).get("plan", file))
        return cls(_json(meta, META_RUN, file), _json(meta, META_CONFIG, file), state, plan)


def _runs(
    footers: Sequence[pq.FileMetaData], said: Sequence[_Said], files: Sequence[Path]
) -> tuple[tuple[Run, ...], frozenset[tuple[str, int]]]:
    """The runs, and what cannot be judged of each: a step that one file of a run has not whole is not whole."""
    runs: dict[str, Run] = {}
    unseen: set[tuple[str, int]] = set()
    for footer, one, file in zip(footers, said, files, strict=True):
        for run_id in _run_ids(footer, file):
            before = runs.get(run_id, Run(run_id, {}))
            profile = before.profile or str(one.run.get("profile") or "")
            runs[run_id] = Run(run_id, before.config or one.config, profile, (*before.files, file))
            unseen.update((run_id, step) for step in one.state.unseen)
    return tuple(runs.values()), frozenset(unseen)


def _run_ids(footer: pq.FileMetaData, file: Path) -> list[str]:
    """The runs a file has rows of: by the statistics of its row groups, where each is of one run."""
    columns = [footer.schema.column(number).path for number in range(len(footer.schema))]
    if "run_id" not in columns:
        return [""]
    found: dict[str, None] = {}
    with reading(file):
        for group in range(footer.num_row_groups):
            known = footer.row_group(group).column(columns.index("run_id")).statistics
            if known is not None and known.has_min_max and known.min == known.max and not known.null_count:
                found[str(known.min)] = None
            else:
                listed = pq.ParquetFile(file, metadata=footer).read_row_group(group, columns=["run_id"])["run_id"]
                found.update(dict.fromkeys(str(name or "") for name in listed.unique().to_pylist()))
    return list(found)


def _footer(file: Path) -> pq.FileMetaData:
    if file.stat().st_size == 0:
        raise TraceError(f"{file}: the file is empty (0 bytes); a run killed while writing leaves its parts beside it")
    try:
        return pq.read_metadata(file)
    except (pa.ArrowException, OSError) as error:
        raise TraceError(f"{file}: not a Parquet file ({first_line(error)})") from error


def _pages(footer: pq.FileMetaData, file: Path) -> Pages:
    """The pages of a file, each held against its checksum."""
    with reading(file):
        try:
            return verify(file, footer)
        except Damaged as error:
            raise TraceError(f"{file}: damaged since it was written: {error}") from error


def _schema(footer: pq.FileMetaData, file: Path) -> pa.Schema:
    with reading(file):
        # The footer's own key-value pairs: a writer may add some after the schema was fixed.
        schema = footer.schema.to_arrow_schema().with_metadata(footer.metadata)
    version = (schema.metadata or {}).get(META_VERSION, str(SCHEMA_VERSION).encode()).decode(errors="replace")
    if not version.isdigit():
        raise TraceError(f"{file}: schema version {version!r} is not a number")
    if int(version) > SCHEMA_VERSION:
        raise TraceError(
            f"{file}: schema version {version} is newer than {SCHEMA_VERSION}, which this lineage reads; "
            "upgrade with: pip install -U rl-lineage"
        )
    if wrong := next(unfit(schema), None):
        raise TraceError(f"{file}: {wrong}; write it again as the recorder does")
    return schema


def _json(meta: Mapping[bytes, bytes], key: bytes, file: Path) -> dict[str, Any]:
    raw = meta.get(key)
    if raw is None:
        return {}
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise TraceError(f"{file}: metadata {key.decode()} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise TraceError(f"{file}: metadata {key.decode()} is no JSON object")
    return value


def _too_early(target: Path | str, state: State) -> str:
    return f"{target}: no step is recorded yet ({'; '.join(state.live)}); check it again later"


def _hint(target: Path) -> str:
    return "; no run yet? try: lineage run" if "latest" in target.parts else ""
