"""From parts to Parquet: streamed, in bounded memory, each file written aside and renamed.

A large run becomes several files, cut between steps. A compaction that was killed goes on where it was: the files that
were finished stay as they are, and the parts go when all files are there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lineage import locks
from lineage.errors import UserError
from lineage.links import linked
from lineage.parts import PARTS, SEALED_SUFFIX, Damage, Place, batches, by_process, part_files, parts_folder
from lineage.run import INFO_FILE, TRACE_FILE, file_metadata
from lineage.schema import META_STATE, schema
from lineage.segments import Segment, segment_files, segment_of, trace_files
from lineage.state import STATE_SUFFIX, is_written, run_state, states
from lineage.steps import Steps

_GROUP_FACTS = 1 << 19  # a check opens a row group once; small ones cost it many times the reading
_SEGMENT_FACTS = 1 << 26  # about 400 MB
_DICTIONARY_BYTES = 4 << 20  # holds 64k keys of 60 characters
_READ_AGAIN = 10
_DONE = "compacted"  # in the parts folder: all that is in it is in the trace


class PartsGone(UserError):
    """There are no parts, or they were compacted while they were read: the trace is in its own files now."""


def compact(folder: Path, closing: str | None = None) -> Path:
    """Turn the parts of a run into ``folder/trace.parquet`` and remove them.

    A run of more than about 67 million facts becomes ``trace-00001.parquet``, ``trace-00002.parquet`` and so on.

    Args:
        folder: run folder, or its parts folder.
        closing: the process that closes and compacts; the others must have ended.

    Returns:
        What to open: the file, or the run folder where there are several.

    Raises:
        UserError: there are no parts, or another process is still writing them.
        OSError: the disk refused; the parts stay.
    """
    folder = _run_folder(folder)
    parts = _parts_or_rest(folder)
    if parts is not None:
        with locks.hold(parts):
            _compact(folder, parts, closing)
    elif not trace_files(folder):
        raise UserError(f"no parts to compact under {folder}: expected {PARTS}/ as a recorder leaves it")
    return folder / TRACE_FILE if (folder / TRACE_FILE).exists() else folder


def _run_folder(folder: Path) -> Path:
    """The folder a run's trace belongs in: that of its parts, or the one around it."""
    whole = folder if folder.name else folder.resolve()
    inside = whole.name == PARTS and (part_files(whole) or (whole / _DONE).exists())
    return whole.parent if inside else folder


def _parts_or_rest(folder: Path) -> Path | None:
    """The parts, or what is left of them where a compaction was killed while it removed them."""
    rest = next((place for place in (folder / PARTS, folder) if (place / _DONE).exists()), None)
    return rest or parts_folder(folder)


def _compact(folder: Path, parts: Path, closing: str | None) -> None:
    if not (parts / _DONE).exists():
        if not part_files(parts):  # another process closed at the same time and has compacted
            if parts != folder:
                with contextlib.suppress(OSError):
                    parts.rmdir()
            return
        for path, state in states(parts):
            if state is not None and state["process"] != closing and is_written(path, state):
                who = f"process {state['pid']} on {state.get('host', 'this host')}"
                raise UserError(f"{folder} is still being written by {who}: compact it when that ends")
        for left in folder.glob(".trace*.parquet.tmp"):
            left.unlink(missing_ok=True)
        if not _write_trace(parts, folder):
            return
        (parts / _DONE).touch()
    _remove(parts, folder)


def _remove(parts: Path, folder: Path) -> None:
    """Remove what the trace now holds, and nothing else."""
    for path in [*part_files(parts), *parts.glob(f"*{STATE_SUFFIX}"), parts / INFO_FILE, parts / _DONE]:
        path.unlink(missing_ok=True)
    if parts != folder:
        with contextlib.suppress(OSError):  # something else lies there
            parts.rmdir()


def materialise(folder: Path, into: Path | None = None) -> Path:
    """The parts of a run as a temporary Parquet file; the parts, which may still grow, are left alone.

    The states are read before the parts, and again after them: what was sealed in between is not judged, and what was
    removed in between is not missed.

    Args:
        folder: run folder or parts folder.
        into: where to make the file; a new temporary folder when None, which the caller removes.

    Raises:
        PartsGone: there are no parts, or they were compacted meanwhile.
    """
    parts = parts_folder(folder)
    if parts is None:
        raise PartsGone(f"no trace under {folder}: expected {TRACE_FILE} or {PARTS}/*{SEALED_SUFFIX}")
    target = Path(tempfile.mkdtemp(prefix="lineage-") if into is None else into) / TRACE_FILE
    try:
        for _ in range(_READ_AGAIN):
            if _as_it_is(parts, target):
                break
    except BaseException:
        if into is None:
            shutil.rmtree(target.parent, ignore_errors=True)
        raise
    return target


def _as_it_is(parts: Path, target: Path) -> bool:
    """Write what the parts hold now; False when the recorder was faster than this reader, who should try again.

    Listing a folder in which files are renamed may miss one, and all that was listed may be gone when it is read.
    """
    state, metadata = run_state(parts), file_metadata(parts, {})
    streams, damage = by_process(part_files(parts)), Damage()
    found: set[int] = set()
    with _writer(target) as writer:
        for table in _tables(linked(batches(streams, damage, without=state["removed"]))):
            writer.write_table(table, row_group_size=max(table.num_rows, 1))
            found.update(pc.unique(table["global_steps"]).to_pylist())
        if (parts / _DONE).exists() or not part_files(parts):
            raise PartsGone(f"{parts} was compacted while it was read: open it again")
        gone = run_state(parts)["removed"]
        said = _said(state, found, damage, gone)
        writer.add_key_value_metadata({**metadata, META_STATE: json.dumps(said).encode()})
    missed = [step for step in state["steps"] if step not in found and step not in gone]
    hurried = (missed and not damage.parts) or (damage.gone and not found)
    return not (state["live"] and hurried)


@dataclass(frozen=True)
class _Span:
    """The batches of one file: where each process's begin, and how many there are in all."""

    start: Mapping[int, Place]
    count: int


def _write_trace(parts: Path, folder: Path) -> bool:
    """Write the files of the trace; False when a part could not be read to its end, and must be kept."""
    streams, state, damage = by_process(part_files(parts)), run_state(parts), Damage()
    sizes = [(path.name, path.stat().st_size) for paths in streams for path in paths]
    while True:
        spans, found = _plan(streams, damage, state["removed"])
        metadata = file_metadata(parts, _said(state, found, damage, Steps()))
        planned = dict(damage.parts)
        made_from = f"{pa.__version__} {sorted(metadata.items())} {sizes} {planned} {spans}"
        plan = hashlib.sha256(made_from.encode()).hexdigest()[:32]
        segments = [Segment(number, len(spans), plan) for number in range(1, len(spans) + 1)]
        for segment, span in zip(segments, spans, strict=True):
            target = folder / segment.name
            if segment.of > 1 and segment_of(target) == segment:
                continue  # an earlier compaction of these parts has finished it
            placed = islice(batches(streams, damage, without=state["removed"], start=span.start), span.count)
            _write_file(target, linked(placed), {**metadata, **segment.metadata()})
        if damage.parts == planned:
            break  # else the content of a batch was damaged, though its frame was whole: plan without it
    _remove_others(folder, {segment.name for segment in segments})
    return not damage.parts


def _plan(streams: list[list[Path]], damage: Damage, without: Steps) -> tuple[list[_Span], set[int]]:
    """Where to cut the run into files, and the steps it has; reads two columns."""
    spans: list[_Span] = []
    found: set[int] = set()
    start: dict[int, Place] = {}
    count = facts = step = 0
    for place, batch in batches(streams, damage, without=without, columns=("global_steps", "n")):
        if facts >= _SEGMENT_FACTS and place.step != step:
            spans.append(_Span(start, count))
            start, count, facts = {}, 0, 0
        start.setdefault(place.process, place)
        step = place.step
        count += 1
        facts += pc.sum(batch.column("n")).as_py() or 0
        found.update(pc.unique(batch.column("global_steps")).to_pylist())
    spans.append(_Span(start, count))
    return spans, found


def _said(state: Mapping[str, Any], found: set[int], damage: Damage, gone: Steps) -> dict[str, Any]:
    """The state of a run as its trace's metadata has it.

    Args:
        state: of all processes, read before the parts.
        found: steps with rows.
        damage: parts that cannot be read to their end.
        gone: steps removed by ``keep_steps`` while the parts were read.
    """
    # a step that was sealed and cannot be read any more is torn, whatever the process said of it
    torn = {*state["torn"], *(step for step in state["steps"] if step not in found and step not in gone)}
    reached = state["reached"]
    begun = {step for step in found if reached is not None and step > reached} - torn
    halved = {step for step in found if step in gone}
    if not state["live"]:
        torn, begun = torn | begun, set()
    said = {name: state[name] for name in ("closed", "steps", "torn", "dropped", "processes")}
    said["torn"] = sorted(torn)
    said["steps"] = [step for step in state["steps"] if step not in torn | begun | halved and step not in gone]
    why = [f"part {name} cannot be read to its end" for name in sorted(damage.parts)]
    said["dropped"] = {**state["dropped"], "why": state["dropped"]["why"] + why}
    if "error" in state:
        said["error"] = state["error"]
    if state["removed"] or gone:
        said["removed"] = Steps.of(sorted({*state["removed"], *gone})).ranges
    if state["live"]:
        said |= {"live": state["live"], "open": sorted(begun | halved)}
    elif halved:
        said["open"] = sorted(halved)
    return said


def _write_file(target: Path, placed: Iterable[pa.RecordBatch], metadata: dict[bytes, bytes]) -> None:
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        with _writer(temporary) as writer:
            for table in _tables(placed):
                writer.write_table(table, row_group_size=max(table.num_rows, 1))
            writer.add_key_value_metadata(metadata)
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())  # the parts go next
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _writer(target: Path) -> pq.ParquetWriter:
    return pq.ParquetWriter(
        target,
        schema(),
        compression="zstd",
        compression_level=3,
        dictionary_pagesize_limit=_DICTIONARY_BYTES,
        data_page_size=_DICTIONARY_BYTES,
        write_page_index=False,
        write_page_checksum=True,  # a page that was damaged since is an error, not other numbers
    )


def _tables(placed: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Batches as tables of a row group each."""
    group: list[pa.RecordBatch] = []
    facts = 0
    for batch in placed:
        group.append(batch)
        facts += pc.sum(batch.column("n")).as_py() or 0
        if facts >= _GROUP_FACTS:
            yield pa.Table.from_batches(group).cast(schema())
            group, facts = [], 0
    if group:
        yield pa.Table.from_batches(group).cast(schema())


def _remove_others(folder: Path, names: set[str]) -> None:
    """Remove the files an earlier compaction, of fewer parts, has left."""
    earlier = [path for path in segment_files(folder) if segment_of(path) is not None]
    for path in [folder / TRACE_FILE, *earlier]:
        if path.name not in names:
            path.unlink(missing_ok=True)
