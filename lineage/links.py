"""Who wrote what a reader of the queue read: producer and parent event, worked out when the step is whole.

A process links what it read of its own writes as it seals a step; what it read of other processes' is linked when the
parts of all of them become one trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import pyarrow as pa

from lineage.parts import Place
from lineage.row import FinishedRow

Where = tuple[str, str, str]  # partition, entity, field


class Writer(NamedTuple):
    """An event that wrote a field."""

    producer: str | None
    process: str
    seq: int


class Written:
    """Which event wrote each key of each field last.

    A field may have several writers: sessions write trajectories and the balance stage adds padding rows.
    """

    def __init__(self) -> None:
        self._writers: dict[Where, dict[Writer, set[str]]] = {}

    def write(self, where: Where, keys: Iterable[str], writer: Writer) -> None:
        """A field of these keys is written."""
        names = set(keys)
        writers = self._writers.setdefault(where, {})
        for others in writers.values():
            others -= names
        writers[writer] = names

    def last(self, where: Where, keys: Sequence[str]) -> Writer | None:
        """Who wrote most of these keys; None where nobody wrote any."""
        writers = self._writers.get(where)
        if not writers:
            return None
        writer, names = next(iter(writers.items()))
        if len(writers) > 1:
            writer, names = max(writers.items(), key=lambda one: len(one[1].intersection(keys)))
        return None if names.isdisjoint(keys) else writer


def link(rows: Iterable[FinishedRow], process: str) -> None:
    """Give each read of the queue the component that wrote most of its keys, and the event it read.

    Args:
        rows: rows of one step in the order of their events; changed in place.
        process: the process that wrote them.
    """
    written = Written()
    for row in rows:
        scalars, keys = row.scalars, row.keys
        partition = scalars.get("partition")
        if partition is None or keys is None:
            continue
        where = (partition, scalars["entity"], scalars["field"])
        if scalars["op"] == "produce":
            written.write(where, keys, Writer(scalars.get("producer"), process, row.seq))
        elif scalars["op"] == "consume" and (writer := written.last(where, keys)) is not None:
            scalars["producer"] = scalars.get("producer") or writer.producer
            scalars["parent"] = {"process": process, "seq": writer.seq}


def linked(placed: Iterable[tuple[Place, pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
    """Batches of all processes, each read of one process linked to what another has written in the same step.

    Args:
        placed: batches by step, those of one step together.
    """
    for _, group in groupby(placed, key=lambda one: one[0].step):
        of_step = [(place.process, batch) for place, batch in group]
        if len({process for process, _ in of_step}) == 1:
            yield from (batch for _, batch in of_step)
        else:
            yield from _link_across([batch for _, batch in of_step])


_ASKED = ("time_ns", "process", "seq", "op", "partition", "entity", "field", "producer", "parent", "key")


def _link_across(batches: Sequence[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches of one step, by the clock: a process knows its own writes, not the others'."""
    columns = [{name: batch.column(name) for name in _ASKED} for batch in batches]
    events = []
    for number, of in enumerate(columns):
        ops, partitions = of["op"].to_pylist(), of["partition"].to_pylist()
        times, seqs = of["time_ns"].to_pylist(), of["seq"].to_pylist()
        events += [
            (times[row], number, seqs[row], row)
            for row, (op, partition) in enumerate(zip(ops, partitions, strict=True))
            if partition is not None and op in ("produce", "consume")
        ]
    written, found = Written(), [dict[int, Writer]() for _ in batches]
    for _, number, seq, row in sorted(events):
        of = columns[number]
        op, partition, entity, field, process, producer = (
            of[name][row].as_py() for name in ("op", "partition", "entity", "field", "process", "producer")
        )
        keys = of["key"][row].as_py()
        if keys is None:
            continue
        where = (partition, entity, field)
        if op == "produce":
            written.write(where, keys, Writer(producer, process, seq))
        elif not of["parent"][row].is_valid and (writer := written.last(where, keys)) is not None:
            found[number][row] = writer
    for batch, writers in zip(batches, found, strict=True):
        yield _with_writers(batch, writers) if writers else batch


def _with_writers(batch: pa.RecordBatch, writers: dict[int, Writer]) -> pa.RecordBatch:
    """A batch whose rows of these numbers say who wrote what they read."""
    producers, parents = batch.column("producer").to_pylist(), batch.column("parent").to_pylist()
    for row, writer in writers.items():
        producers[row] = producers[row] or writer.producer
        parents[row] = {"process": writer.process, "seq": writer.seq}
    made: dict[str, list[Any]] = {"producer": producers, "parent": parents}
    for name, values in made.items():
        at = batch.schema.get_field_index(name)
        batch = batch.set_column(at, batch.schema.field(at), pa.array(values, batch.schema.field(at).type))
    return batch
