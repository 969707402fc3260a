"""Where a trace lies: a file, a folder or a glob becomes Parquet files and what they say of themselves."""

from __future__ import annotations

import glob
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lineage.compact import materialise, parts_folder
from lineage.errors import UserError
from lineage.run import TRACE_FILE
from lineage.schema import COLUMNS, META_CONFIG, META_RUN, META_STATE, META_VERSION, SCHEMA_VERSION

_IDENTITY = ("global_steps", "stage", "op", "field")


class TraceError(UserError):
    """A trace that cannot be read: what is wrong, where, and how to mend it, in one line."""


@dataclass(frozen=True)
class State:
    """What a trace says of its own completeness.

    Attributes:
        closed: the run ended in order; a trace that does not say is taken as closed.
        torn: steps begun and never sealed.
        dropped_rows: rows lost.
        dropped_steps: steps they were lost in.
        why: why rows were dropped, or what ended the run.
    """

    closed: bool = True
    torn: tuple[int, ...] = ()
    dropped_rows: int = 0
    dropped_steps: tuple[int, ...] = ()
    why: str = ""

    @property
    def unseen(self) -> tuple[int, ...]:
        """Steps that cannot be judged, because some of their rows are missing."""
        return tuple(sorted({*self.torn, *self.dropped_steps}))

    @property
    def complete(self) -> bool:
        """True when every row of every step is here."""
        return self.closed and not self.unseen and self.dropped_rows == 0

    def sentence(self) -> str:
        """One clause that names what is missing; empty for a complete trace."""
        parts = []
        if self.torn:
            parts.append(f"step {_join(self.torn)} torn")
        if self.dropped_rows:
            where = f" in step {_join(self.dropped_steps)}" if self.dropped_steps else ""
            parts.append(f"{self.dropped_rows} rows dropped{where}")
        if not self.closed:
            parts.append("the run did not close its trace")
        return ", ".join(parts) + (f" ({self.why})" if self.why and parts else "")


@dataclass(frozen=True)
class Source:
    """Parquet files of one trace, the columns they hold and their metadata.

    ``temporary`` is the folder to remove when the trace is closed: parts are read through a temporary file.
    """

    path: Path
    files: tuple[Path, ...]
    stored: Mapping[str, pa.DataType]
    run: Mapping[str, Any]
    config: Mapping[str, Any]
    state: State
    temporary: Path | None = None

    @property
    def absent(self) -> frozenset[str]:
        """Columns of the schema this trace does not hold."""
        return frozenset(column.name for column in COLUMNS) - frozenset(self.stored)


def locate(path: str | Path) -> Source:
    """Find and validate the files of a trace.

    Args:
        path: a Parquet file, a run folder, a folder of parts, or a glob of Parquet files.

    Raises:
        TraceError: nothing there, not a trace, empty, or from a newer schema.
    """
    target = Path(path)
    files, temporary = _files(target)
    try:
        return _described(target, files, temporary)
    except BaseException:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _described(target: Path, files: list[Path], temporary: Path | None) -> Source:
    schemas = [_schema(file) for file in files]
    stored: dict[str, pa.DataType] = {}
    for arrow in schemas:
        stored |= {column.name: column.type for column in arrow if column.name not in stored}
    missing = [name for name in _IDENTITY if name not in stored]
    if missing:
        raise TraceError(f"{files[0]}: Parquet, but not a lineage trace (no column {', '.join(missing)})")
    if sum(pq.read_metadata(file).num_rows for file in files) == 0:
        raise TraceError(f"{target}: the trace is empty (0 rows); was tracing on? see trace.enabled")
    metas = [arrow.metadata or {} for arrow in schemas]
    state = merge([read_state(_json(meta, META_STATE, file)) for meta, file in zip(metas, files, strict=True)])
    run = next((found for meta in metas if (found := _json(meta, META_RUN, files[0]))), {})
    config = next((found for meta in metas if (found := _json(meta, META_CONFIG, files[0]))), {})
    return Source(target, tuple(files), stored, run, config, state, temporary)


def read_state(said: Mapping[str, Any]) -> State:
    """The state a trace's ``lineage.state`` metadata describes."""
    dropped = said.get("dropped") or {}
    reasons = [str(why) for why in dropped.get("why", ())] + ([str(said["error"])] if said.get("error") else [])
    return State(
        bool(said.get("closed", True)),
        tuple(sorted({int(step) for step in said.get("torn") or ()})),
        int(dropped.get("rows", 0)),
        tuple(sorted({int(step) for step in dropped.get("steps", ())})),
        "; ".join(dict.fromkeys(reasons)),
    )


def merge(states: list[State]) -> State:
    """The state of several files read as one trace: closed when all are, torn and dropped together."""
    return State(
        all(state.closed for state in states),
        tuple(sorted({step for state in states for step in state.torn})),
        sum(state.dropped_rows for state in states),
        tuple(sorted({step for state in states for step in state.dropped_steps})),
        "; ".join(dict.fromkeys(state.why for state in states if state.why)),
    )


def _files(target: Path) -> tuple[list[Path], Path | None]:
    """The Parquet files of a target, and the temporary folder they lie in, if one had to be made."""
    if target.is_dir():
        return _folder(target)
    if target.exists():
        return _whole(target) if _is_part(target) else ([target], None)
    if glob.has_magic(str(target)):
        found = sorted(Path(name) for name in glob.glob(str(target)))
        if not found:
            raise TraceError(f"{target}: no file matches")
        return _whole(found[0]) if any(_is_part(file) for file in found) else (found, None)
    raise TraceError(f"{target}: no such file or folder{_hint(target)}")


def _folder(folder: Path) -> tuple[list[Path], Path | None]:
    if (folder / TRACE_FILE).is_file():
        return [folder / TRACE_FILE], None
    if parts_folder(folder) is not None:
        return _materialised(folder)
    found = sorted(folder.glob("*.parquet"))
    if not found:
        raise TraceError(f"{folder}: no trace in this folder (looked for {TRACE_FILE}, *.parquet and *.arrow parts)")
    return found, None


def _is_part(file: Path) -> bool:
    return file.name.endswith((".arrow", ".arrow.open"))


def _whole(part: Path) -> tuple[list[Path], Path | None]:
    """A part alone says little: all the parts beside it are read."""
    return _materialised(part.parent)


def _materialised(folder: Path) -> tuple[list[Path], Path | None]:
    """The one seam to the recorder's parts: a temporary Parquet file with full metadata."""
    file = materialise(folder)
    return [file], file.parent


def _schema(file: Path) -> pa.Schema:
    if file.stat().st_size == 0:
        raise TraceError(f"{file}: the file is empty (0 bytes); a run killed while writing leaves its parts beside it")
    try:
        footer = pq.read_metadata(file)
        # The footer's own key-value pairs: a writer may add some after the schema was fixed.
        schema = footer.schema.to_arrow_schema().with_metadata(footer.metadata)
    except (pa.ArrowInvalid, OSError) as error:
        raise TraceError(f"{file}: not a Parquet file ({str(error).splitlines()[0][:120]})") from error
    version = (schema.metadata or {}).get(META_VERSION, str(SCHEMA_VERSION).encode()).decode(errors="replace")
    if not version.isdigit():
        raise TraceError(f"{file}: schema version {version!r} is not a number")
    if int(version) > SCHEMA_VERSION:
        raise TraceError(
            f"{file}: schema version {version} is newer than {SCHEMA_VERSION}, which this lineage reads; "
            "upgrade with: pip install -U rl-lineage"
        )
    return schema


def _json(meta: Mapping[bytes, bytes], key: bytes, file: Path) -> dict[str, Any]:
    raw = meta.get(key)
    if raw is None:
        return {}
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise TraceError(f"{file}: metadata {key.decode()} is not JSON ({error})") from error
    return value if isinstance(value, dict) else {}


def _hint(target: Path) -> str:
    return "; no run yet? try: lineage run" if "latest" in target.parts else ""


def _join(steps: tuple[int, ...] | list[int]) -> str:
    shown = ", ".join(str(step) for step in steps[:5])
    return shown + (f" and {len(steps) - 5} more" if len(steps) > 5 else "")
