"""From parts to one Parquet file: streamed, in bounded memory, written aside and renamed, so it can be run again."""

from __future__ import annotations

import heapq
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lineage.errors import UserError
from lineage.run import TRACE_FILE, file_metadata
from lineage.schema import schema
from lineage.writer import OPEN_SUFFIX, PARTS, SEALED_SUFFIX, STATE_SUFFIX, read_state

_GROUP_FACTS = 1 << 19  # a check opens a row group once; small ones cost it many times the reading
_DICTIONARY_BYTES = 4 << 20  # holds 64k keys of 60 characters


def parts_folder(folder: Path) -> Path | None:
    """Where the parts of a run folder (or of a parts folder) lie, or None where there are none."""
    for place in (folder / PARTS, folder):
        if place.is_dir() and any(place.glob(f"*{SEALED_SUFFIX}*")):
            return place
    return None


def compact(folder: Path) -> Path:
    """Turn the parts of a run into ``folder/trace.parquet`` and remove them.

    Raises:
        UserError: there are no parts, or another process is still writing them.
        OSError: the disk refused; the parts stay.
    """
    parts = parts_folder(folder)
    target = folder / TRACE_FILE
    if parts is None:
        if target.exists():
            return target
        raise UserError(f"no parts to compact under {folder}: expected {PARTS}/*{SEALED_SUFFIX}")
    for path in parts.glob(f"*{STATE_SUFFIX}"):
        state = read_state(path)
        if not state["closed"] and state["pid"] != os.getpid() and _alive(state["pid"]) and "error" not in state:
            raise UserError(f"{folder} is still being written by process {state['pid']}: compact it when that ends")
    temporary = folder / f".{TRACE_FILE}.tmp"
    try:
        _write(parts, temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    if parts != folder:
        shutil.rmtree(parts)
    else:
        for path in [*parts.glob(f"*{SEALED_SUFFIX}*"), *parts.glob(f"*{STATE_SUFFIX}")]:
            path.unlink()
    return target


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
        try:
            state = read_state(path)
        except (json.JSONDecodeError, KeyError):
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


def _write(parts: Path, target: Path) -> None:
    with pq.ParquetWriter(
        target,
        schema(),
        compression="zstd",
        compression_level=3,
        dictionary_pagesize_limit=_DICTIONARY_BYTES,
        data_page_size=_DICTIONARY_BYTES,
        write_page_index=False,
    ) as writer:
        for group in _groups(_batches(parts)):
            table = pa.Table.from_batches(group).cast(schema())
            writer.write_table(table, row_group_size=max(table.num_rows, 1))
        writer.add_key_value_metadata(file_metadata(parts, trace_state(parts)))


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


def _batches(parts: Path) -> Iterator[pa.RecordBatch]:
    """Batches of all processes, merged by step; each process's own order is kept."""
    streams: dict[str, list[Path]] = {}
    for path in sorted(parts.glob(f"*{SEALED_SUFFIX}*")):
        if path.name.endswith((SEALED_SUFFIX, OPEN_SUFFIX)):
            streams.setdefault(path.name.split(".")[0].rpartition("-")[0], []).append(path)
    keyed = [_keyed(index, paths) for index, paths in enumerate(streams.values())]
    for _, _, _, batch in heapq.merge(*keyed, key=lambda item: item[:3]):
        yield batch


def _keyed(index: int, paths: list[Path]) -> Iterator[tuple[int, int, int, pa.RecordBatch]]:
    number = 0
    step = 0
    for path in paths:
        for batch in read_part(path):
            if batch.num_rows:
                # a process's own order stands even where its steps go back, as after a resume
                step = max(step, batch.column("global_steps")[0].as_py())
            yield step, index, number, batch
            number += 1


def read_part(path: Path) -> Iterator[pa.RecordBatch]:
    """Whole batches of a part; what a killed process left of the last one is skipped."""
    try:
        with pa.OSFile(str(path)) as source, pa.ipc.open_stream(source) as reader:
            while True:
                try:
                    yield reader.read_next_batch()
                except StopIteration:
                    return
    except (pa.ArrowInvalid, OSError):
        return


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
