"""From parts to one Parquet file: streamed, in bounded memory, written aside and renamed, so it can be run again."""

from __future__ import annotations

import contextlib
import heapq
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lineage.errors import UserError
from lineage.run import INFO_FILE, TRACE_FILE, file_metadata
from lineage.schema import schema
from lineage.writer import OPEN_SUFFIX, PARTS, SEALED_SUFFIX, STATE_SUFFIX, read_state

_GROUP_FACTS = 1 << 19  # a check opens a row group once; small ones cost it many times the reading
_DICTIONARY_BYTES = 4 << 20  # holds 64k keys of 60 characters


_PART_NAME = re.compile(rf"(?P<stem>.+)-\d{{5}}{re.escape(SEALED_SUFFIX)}(\.open)?")


def part_files(folder: Path) -> list[Path]:
    """Parts in a folder: named as the recorder names them, with their process's state beside them."""
    return [
        path
        for path in sorted(folder.glob(f"*{SEALED_SUFFIX}*"))
        if (name := _PART_NAME.fullmatch(path.name)) and (folder / f"{name['stem']}{STATE_SUFFIX}").exists()
    ]


def parts_folder(folder: Path) -> Path | None:
    """Where the parts of a run folder (or of a parts folder) lie, or None where there are none."""
    return next((place for place in (folder / PARTS, folder) if place.is_dir() and part_files(place)), None)


def compact(folder: Path, closing: str | None = None) -> Path:
    """Turn the parts of a run into ``folder/trace.parquet`` and remove them.

    Args:
        folder: run folder.
        closing: the process that closes and compacts; the others must have ended.

    Raises:
        UserError: there are no parts, or another process is still writing them.
        OSError: the disk refused; the parts stay.
    """
    parts = parts_folder(folder)
    target = folder / TRACE_FILE
    if parts is None:
        if target.exists():
            return target
        raise UserError(f"no parts to compact under {folder}: expected {PARTS}/ as a recorder leaves it")
    for path in parts.glob(f"*{STATE_SUFFIX}"):
        state = _state_or_none(path)
        if state is not None and state["process"] != closing and _is_written(state):
            raise UserError(f"{folder} is still being written by process {state['pid']}: compact it when that ends")
    temporary = folder / f".{TRACE_FILE}.tmp"
    try:
        whole = _write(parts, temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    if whole:
        _remove(parts, folder)
    return target


def _remove(parts: Path, folder: Path) -> None:
    """Remove what the trace now holds, and nothing else."""
    for path in [*part_files(parts), *parts.glob(f"*{STATE_SUFFIX}"), parts / INFO_FILE]:
        path.unlink(missing_ok=True)
    if parts != folder:
        with contextlib.suppress(OSError):  # something else lies there
            parts.rmdir()


def materialise(folder: Path) -> Path:
    """The parts of a run as a temporary Parquet file; the parts, which may still grow, are left alone.

    Returns:
        Path of the file, in a temporary folder of its own that the caller removes.
    """
    parts = parts_folder(folder)
    if parts is None:
        raise UserError(f"no trace under {folder}: expected {TRACE_FILE} or {PARTS}/*{SEALED_SUFFIX}")
    target = Path(tempfile.mkdtemp(prefix="lineage-")) / TRACE_FILE
    try:
        _write(parts, target)
    except BaseException:
        shutil.rmtree(target.parent, ignore_errors=True)
        raise
    return target


def trace_state(parts: Path) -> dict[str, Any]:
    """State of all processes of a run as one: a step is torn when any process began it and did not seal it."""
    merged: dict[str, Any] = {
        "closed": True,
        "steps": [],
        "torn": [],
        "dropped": {"rows": 0, "steps": [], "why": []},
        "processes": [],
    }
    for path in sorted(parts.glob(f"*{STATE_SUFFIX}")):
        state = _state_or_none(path)
        if state is None:
            merged["closed"] = False
            merged["dropped"]["why"].append(f"{path.name} is not readable")
            continue
        merged["processes"].append(state["process"])
        merged["closed"] &= state["closed"]
        merged["steps"] += state["steps"]
        merged["torn"] += state["torn"]
        if state["open_step"] is not None:
            merged["torn"].append(state["open_step"])
        merged["dropped"]["rows"] += state["dropped"]["rows"]
        merged["dropped"]["steps"] += state["dropped"]["steps"]
        merged["dropped"]["why"] += state["dropped"]["why"]
        if "error" in state:
            merged["error"] = state["error"]
    merged["closed"] &= bool(merged["processes"])
    merged["torn"] = sorted(set(merged["torn"]))
    merged["steps"] = sorted(set(merged["steps"]) - set(merged["torn"]))
    merged["dropped"]["steps"] = sorted(set(merged["dropped"]["steps"]))
    return merged


def _write(parts: Path, target: Path) -> bool:
    """Write the trace; False when a part could not be read to its end, and must be kept."""
    damaged: list[str] = []
    found: set[int] = set()
    state = trace_state(parts)
    with pq.ParquetWriter(
        target,
        schema(),
        compression="zstd",
        compression_level=3,
        dictionary_pagesize_limit=_DICTIONARY_BYTES,
        data_page_size=_DICTIONARY_BYTES,
        write_page_index=False,
    ) as writer:
        for group in _groups(_batches(parts, damaged)):
            table = pa.Table.from_batches(group).cast(schema())
            writer.write_table(table, row_group_size=max(table.num_rows, 1))
            found.update(pc.unique(table["global_steps"]).to_pylist())
        # a step that was sealed and cannot be read any more is torn, whatever the process said of it
        state["torn"] = sorted({*state["torn"], *(step for step in state["steps"] if step not in found)})
        state["steps"] = [step for step in state["steps"] if step not in state["torn"]]
        state["dropped"]["why"] += [f"part {name} cannot be read to its end" for name in damaged]
        writer.add_key_value_metadata(file_metadata(parts, state))
    return not damaged


def _groups(batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    group: list[pa.RecordBatch] = []
    facts = 0
    for batch in batches:
        group.append(batch)
        facts += pc.sum(batch.column("n")).as_py() or 0
        if facts >= _GROUP_FACTS:
            yield group
            group, facts = [], 0
    if group:
        yield group


def _batches(parts: Path, damaged: list[str]) -> Iterator[pa.RecordBatch]:
    """Batches of all processes, merged by step; each process's own order is kept."""
    streams: dict[str, list[Path]] = {}
    for path in part_files(parts):
        streams.setdefault(path.name.split(".")[0].rpartition("-")[0], []).append(path)
    keyed = [_keyed(index, paths, damaged) for index, paths in enumerate(streams.values())]
    for _, _, _, batch in heapq.merge(*keyed, key=lambda item: item[:3]):
        yield batch


def _keyed(index: int, paths: list[Path], damaged: list[str]) -> Iterator[tuple[int, int, int, pa.RecordBatch]]:
    number = 0
    step = 0
    for path in paths:
        for batch in read_part(path, damaged):
            if batch.num_rows:
                # a process's own order stands even where its steps go back, as after a resume
                step = max(step, batch.column("global_steps")[0].as_py())
            yield step, index, number, batch
            number += 1


def read_part(path: Path, damaged: list[str]) -> Iterator[pa.RecordBatch]:
    """Whole batches of a part; what a killed process left of the last one is skipped.

    Args:
        path: a part, open or sealed.
        damaged: gets the name of a sealed part that has no proper end.
    """
    try:
        with pa.OSFile(str(path)) as source, pa.ipc.open_stream(source) as reader:
            while True:
                try:
                    yield reader.read_next_batch()
                except StopIteration:
                    return
    except (pa.ArrowInvalid, OSError):
        if not path.name.endswith(OPEN_SUFFIX):
            damaged.append(path.name)


def _state_or_none(path: Path) -> dict[str, Any] | None:
    try:
        return read_state(path)
    except (ValueError, KeyError, TypeError):
        return None


def _is_written(state: dict[str, Any]) -> bool:
    return not state["closed"] and "error" not in state and _alive(state["pid"])


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
