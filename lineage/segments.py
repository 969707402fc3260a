"""The files of a trace: one, or numbered segments of one where it is large."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from lineage.run import SEGMENT_FILE, TRACE_FILE
from lineage.schema import META_SEGMENT

_SEGMENT_NAME = re.compile(re.escape(SEGMENT_FILE).replace(r"\{:05d\}", r"\d{5,}"))


@dataclass(frozen=True)
class Segment:
    """What one file of several says of its place among them.

    Attributes:
        number: of the file, from 1.
        of: how many there are.
        plan: the same in all files made from one set of parts, and in no others.
    """

    number: int
    of: int
    plan: str

    @property
    def name(self) -> str:
        """Its file's name: ``trace.parquet`` where it is the only one."""
        return TRACE_FILE if self.of == 1 else SEGMENT_FILE.format(self.number)

    def metadata(self) -> dict[bytes, bytes]:
        """Parquet key-value metadata; none where it is the only one."""
        return {} if self.of == 1 else {META_SEGMENT: json.dumps(asdict(self)).encode()}


def segment_of(path: Path) -> Segment | None:
    """What a file says of its place, or None for one that is not a segment, or not whole."""
    try:
        raw = (pq.read_metadata(path).metadata or {}).get(META_SEGMENT)
        return None if raw is None else Segment(**json.loads(raw))
    except (OSError, pa.ArrowInvalid, ValueError, TypeError):
        return None


def segment_files(folder: Path) -> list[Path]:
    """Files named as segments in a folder, in their order."""
    found = [path for path in folder.glob("trace-*.parquet") if _SEGMENT_NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: (len(path.name), path.name))


def trace_files(folder: Path) -> list[Path]:
    """The files of a finished trace in a run folder; none while it is in parts, or compacted in part only."""
    if (folder / TRACE_FILE).is_file():
        return [folder / TRACE_FILE]
    named = segment_files(folder)
    said = [segment_of(path) for path in named]
    plans = {one.plan for one in said if one is not None}
    whole = bool(said) and len(plans) == 1 and None not in said and said[0] is not None and said[0].of == len(said)
    return named if whole else []
