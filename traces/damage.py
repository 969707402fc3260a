"""Damage that no decoder sees: every page of a Parquet file held against the checksum it was written with.

A reader decodes the columns it is asked for, and most take other bytes for other numbers. So the pages of all columns
are summed before any is read, without being decoded: a file costs about what reading it from the disk does.

What stands around the pages is thrift's compact protocol, of which no more is read here than a page's sizes and sum
(parquet.thrift, ``PageHeader``: 1 type, 2 and 3 its sizes, 4 its CRC). The footer has no sum: Parquet knows none.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

_STOP, _TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _STRUCT = 0, 1, 2, 3, 7, 8, 12  # types of the protocol
_UNREADABLE = (pa.ArrowException, OSError, UnicodeDecodeError)  # what pyarrow says of other bytes
_SIZE, _CRC = 3, 4  # the compressed size and the sum, by their numbers in a page's header


@dataclass(frozen=True)
class Pages:
    """Pages of a file.

    Attributes:
        summed: those with a checksum, which matches.
        unsummed: those without one: bytes that were changed in them are not seen.
    """

    summed: int = 0
    unsummed: int = 0

    def __add__(self, other: Pages) -> Pages:
        return Pages(self.summed + other.summed, self.unsummed + other.unsummed)


class Damaged(Exception):
    """A page is not as it was written: which column, and why."""


def verify(file: Path, footer: pq.FileMetaData) -> Pages:
    """Hold every page of a file against its checksum.

    A file whose writer makes none is left to its readers: nothing in it can be held against anything.

    Args:
        file: where it lies.
        footer: its metadata.

    Raises:
        Damaged: a page does not match, or, in a file with checksums, is none.
        OSError: the file cannot be read.
    """
    pages = Pages()
    broken: Damaged | None = None
    end = file.stat().st_size
    with file.open("rb") as opened:
        for group in range(footer.num_row_groups):
            columns = footer.row_group(group)
            for number in range(columns.num_columns):
                try:
                    pages += _of_chunk(opened, end, columns.column(number))
                except Damaged as error:
                    broken = broken or error
                if broken and pages.summed:
                    raise broken
    return pages


def culprit(path: Path | str) -> str:
    """The first column that cannot be decoded, as the head of a sentence; empty where nothing can be said.

    For an error that is there already: it decodes everything.

    Args:
        path: a file, or a folder of files; nothing is said of another.
    """
    place = Path(path)
    try:
        files = sorted(place.glob("*.parquet")) if place.is_dir() else [place] if place.is_file() else []
    except OSError:
        return ""
    for file in files:
        if name := _undecodable(file):
            return f"column {name}: " if file == place else f"{file.name}, column {name}: "
    return ""


def _undecodable(file: Path) -> str:
    try:
        opened = pq.ParquetFile(file)
        columns = opened.schema_arrow.names
    except _UNREADABLE:
        return ""
    for group in range(opened.num_row_groups):
        for name in columns:
            try:
                opened.read_row_group(group, columns=[name], use_threads=False).validate(full=True)
            except _UNREADABLE:
                return str(name)
    return ""


def _of_chunk(opened: BinaryIO, end: int, chunk: pq.ColumnChunkMetaData) -> Pages:
    """The pages of one column of one row group, in a file of so many bytes."""
    start = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
    length = chunk.total_compressed_size
    if min(start, length) < 0 or start + length > end:
        raise Damaged(f"column {_name(chunk)}: it would lie outside the file")
    opened.seek(start)
    data = opened.read(length)
    at = summed = unsummed = 0
    try:
        while at < length:
            at, size, crc = _page(data, at)
            if size < 0 or at + size > len(data):
                raise IndexError
            if crc is None:
                unsummed += 1
            elif zlib.crc32(memoryview(data)[at : at + size]) != crc:
                raise Damaged(f"column {_name(chunk)}: a page does not match its checksum")
            else:
                summed += 1
            at += size
    except (IndexError, ValueError, RecursionError) as error:  # whatever other bytes look like
        raise Damaged(f"column {_name(chunk)}: a page's header cannot be read") from error
    return Pages(summed, unsummed)


def _name(chunk: pq.ColumnChunkMetaData) -> str:
    """The column, and in it the part of a struct, without what Parquet calls the elements of a list."""
    return str(chunk.path_in_schema).replace(".list.element", "")


def _page(data: bytes, at: int) -> tuple[int, int, int | None]:
    """Where a page's content begins, how long it is, and its checksum."""
    size, crc, field = -1, None, 0
    while (head := data[at]) != _STOP:
        at += 1
        if head >> 4:
            field += head >> 4
        else:
            field, at = _number(data, at)
        if field in (_SIZE, _CRC):
            value, at = _number(data, at)
            if field == _SIZE:
                size = value
            else:
                crc = value & 0xFFFFFFFF
        else:
            at = _behind(data, at, head & 15)
    return at + 1, size, crc


def _number(data: bytes, at: int) -> tuple[int, int]:
    """A number of zigzag form, and where it ends."""
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("no number is as long")


def _behind(data: bytes, at: int, type_: int) -> int:
    """Where a value of this type ends."""
    if type_ in (_TRUE, _FALSE):  # it is in its field's head
        return at
    if type_ == _BYTE:
        return at + 1
    if type_ < _DOUBLE:
        return _varint(data, at)[1]
    if type_ == _DOUBLE:
        return at + 8
    if type_ == _BINARY:
        length, at = _varint(data, at)
        return at + length
    if type_ == _STRUCT:
        while (head := data[at]) != _STOP:
            at += 1
            if not head >> 4:
                _, at = _varint(data, at)
            at = _behind(data, at, head & 15)
        return at + 1
    raise ValueError(f"no page header has a value of type {type_}")
