"""A small trace of two steps, written as it is or changed, for the tests of ``traces.diff``."""

from __future__ import annotations

import json
from functools import cache

import pyarrow as pa
import pyarrow.parquet as pq
import synthetic

from lineage.schema import LISTED, schema
from lineage.traces.diff import ASPECTS, aspects

PLACE = {aspect.name for aspect in ASPECTS if aspect.group == aspects.PLACE}


@cache
def small():
    """The rows of two small steps, as dictionaries."""
    made = [row for step in synthetic.steps(2, synthetic.small(padding=4)) for row in step]
    return synthetic.to_table(made).to_pylist()


def write(path, rows, **meta):
    """Rows as a trace, with metadata of the recorder's names."""
    said = schema().metadata | {f"lineage.{name}".encode(): json.dumps(value).encode() for name, value in meta.items()}
    pq.write_table(pa.Table.from_pylist(rows, schema().with_metadata(said)), path)
    return path


def aspects_of(found, counted=None):
    """The aspects in which two traces differ: those that count, those that do not, or all."""
    return {one.aspect for one in found.counts if counted is None or one.counts is counted}


def shuffled(row, order):
    """A row with its elements in another order."""
    return {
        **row,
        **{column.name: [row[column.name][i] for i in order] for column in LISTED if row[column.name] is not None},
    }
