"""Who wrote what a reader of the queue read: producer and parent event, worked out when the step is whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lineage.row import FinishedRow

Place = tuple[str, str, str]  # partition, entity, field
Writer = tuple[str | None, int]  # component, event number


def link(rows: Iterable[FinishedRow], process: str) -> None:
    """Give each read of the queue the component that wrote most of its keys, and the event it read.

    A field may have several writers: sessions write trajectories and the balance stage adds padding rows. A key's
    writer is the last one.

    Args:
        rows: rows of one step in the order of their events; changed in place.
        process: the process that wrote them.
    """
    written: dict[Place, dict[Writer, set[str]]] = {}
    for row in rows:
        scalars, keys = row.scalars, row.keys
        partition = scalars.get("partition")
        if partition is None or keys is None:
            continue
        place = (partition, scalars["entity"], scalars["field"])
        if scalars["op"] == "produce":
            names = set(keys)
            writers = written.setdefault(place, {})
            for others in writers.values():
                others -= names
            writers[scalars.get("producer"), row.seq] = names
        elif scalars["op"] == "consume" and place in written:
            _read(scalars, keys, written[place], process)


def _read(scalars: dict[str, Any], keys: tuple[str, ...], writers: dict[Writer, set[str]], process: str) -> None:
    (producer, seq), names = next(iter(writers.items()))
    if len(writers) > 1:
        (producer, seq), names = max(writers.items(), key=lambda writer: len(writer[1].intersection(keys)))
    if not names.isdisjoint(keys):
        scalars["producer"] = scalars.get("producer") or producer
        scalars["parent"] = {"process": process, "seq": seq}
