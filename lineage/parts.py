"""The parts of a run: their names, and their batches read back, also while a recorder adds, seals and removes them."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from lineage.buffers import part_schema
from lineage.state import STATE_SUFFIX
from lineage.steps import Steps

PARTS = "parts"
OPEN_SUFFIX = ".arrow.open"
SEALED_SUFFIX = ".arrow"

_NAME = re.compile(rf"(?P<stem>.+)-(?P<number>\d{{5,}}){re.escape(SEALED_SUFFIX)}(\.open)?")


def part_files(folder: Path) -> list[Path]:
    """Parts in a folder: named as the recorder names them, with their process's state beside them."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob(f"*{SEALED_SUFFIX}*")):
        if (stem := stem_of(path)) is not None and (folder / f"{stem}{STATE_SUFFIX}").exists():
            found.setdefault(path.name.removesuffix(".open"), path)  # renamed while the folder was listed: once
    return list(found.values())


def stem_of(path: Path) -> str | None:
    """The process a part is of, as its name says it; None for what is not a part."""
    name = _NAME.fullmatch(path.name)
    return name["stem"] if name else None


def number_of(path: Path) -> int:
    """Number of a part among those of its process."""
    name = _NAME.fullmatch(path.name)
    return int(name["number"]) if name else -1


def parts_folder(folder: Path) -> Path | None:
    """Where the parts of a run folder (or of a parts folder) lie, or None where there are none."""
    return next((place for place in (folder / PARTS, folder) if place.is_dir() and part_files(place)), None)


@dataclass(frozen=True, order=True)
class Place:
    """A batch's place in the order of the run: by step, then by process, then as its process wrote it.

    Attributes:
        step: the batch's step; never less than that of the process's batch before, as after a resume.
        process: number of the process among those of the run, by name.
        part: number of its part among the process's.
        batch: number of the batch within the part.
    """

    step: int
    process: int
    part: int
    batch: int


@dataclass
class Damage:
    """What could not be read.

    Attributes:
        parts: names of sealed parts without a proper end, and how many whole batches they have.
        gone: names of parts that were removed after they were listed.
    """

    parts: dict[str, int] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)


def by_process(files: Sequence[Path]) -> list[list[Path]]:
    """Parts of each process, in the order they were written."""
    streams: dict[str | None, list[Path]] = {}
    for path in files:
        streams.setdefault(stem_of(path), []).append(path)
    return [sorted(paths, key=number_of) for paths in streams.values()]


def batches(
    streams: Sequence[Sequence[Path]],
    damage: Damage,
    *,
    without: Steps | None = None,
    columns: Sequence[str] | None = None,
    start: Mapping[int, Place] | None = None,
) -> Iterator[tuple[Place, pa.RecordBatch]]:
    """Batches of all processes, merged by step; each process's own order is kept.

    Args:
        streams: parts of each process.
        damage: gets what cannot be read; a part it names already is read as far as it says.
        without: steps to leave out.
        columns: columns to read; all when None.
        start: for each process, where to start: the place of its first batch. One that is not named has none.
    """
    numbers = range(len(streams)) if start is None else start
    read = [
        _of_process(number, streams[number], damage, without, columns, None if start is None else start[number])
        for number in numbers
    ]
    yield from heapq.merge(*read, key=lambda placed: placed[0])


def _of_process(
    number: int,
    paths: Sequence[Path],
    damage: Damage,
    without: Steps | None,
    columns: Sequence[str] | None,
    start: Place | None,
) -> Iterator[tuple[Place, pa.RecordBatch]]:
    begin = start or Place(0, number, 0, 0)
    step = begin.step
    for part in range(begin.part, len(paths)):
        for index, batch in enumerate(read_part(paths[part], damage, columns)):
            if (part, index) < (begin.part, begin.batch):
                continue
            if batch.num_rows:
                step = max(step, batch.column("global_steps")[0].as_py())
            yield Place(step, number, part, index), _without(batch, without)


def read_part(path: Path, damage: Damage, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Whole batches of a part; what a killed process left of the last one is skipped."""
    if (source := _opened(path)) is None:
        damage.gone.append(path.name)
        return
    name = path.name.removesuffix(".open")
    whole = 0
    try:
        with source, pa.ipc.open_stream(source, options=_options(columns)) as reader:
            while whole < damage.parts.get(name, whole + 1):
                try:
                    batch = reader.read_next_batch()
                except StopIteration:
                    return
                whole += 1
                yield batch
    except (pa.ArrowInvalid, OSError):
        if not path.name.endswith(OPEN_SUFFIX):
            damage.parts[name] = whole


def steps_of(path: Path) -> list[int]:
    """The steps a part holds, in order."""
    found: dict[int, None] = {}
    for batch in read_part(path, Damage(), ("global_steps",)):
        found.update(dict.fromkeys(pc.unique(batch.column("global_steps")).to_pylist()))
    return list(found)


def _opened(path: Path) -> pa.NativeFile | None:
    """The part under the name it has now; None when it is gone."""
    for name in (path, path.with_name(path.name.removesuffix(".open"))):
        try:
            return pa.OSFile(str(name))
        except FileNotFoundError:
            continue
    return None


def _options(columns: Sequence[str] | None) -> pa.ipc.IpcReadOptions:
    if columns is None:
        return pa.ipc.IpcReadOptions()
    return pa.ipc.IpcReadOptions(included_fields=[part_schema().get_field_index(name) for name in columns])


def _without(batch: pa.RecordBatch, steps: Steps | None) -> pa.RecordBatch:
    if not steps:
        return batch
    held = pc.unique(batch.column("global_steps")).to_pylist()
    left_out = [step for step in held if step in steps]
    if not left_out:
        return batch
    return batch.filter(pc.invert(pc.is_in(batch.column("global_steps"), pa.array(left_out, pa.int64()))))
