"""A long trace in slices of consecutive steps, so that judging it takes bounded memory.

One light pass (an :class:`Index`) says where every row stands in the whole trace and which steps share keys. A
:class:`Slice` is then some steps and those they are judged beside, by the law of :mod:`lineage.checks.window`. What a
slice says counts for its own steps only:

- a violation, in the slice its event is in;
- facts examined, as they add up: those of the slice with all steps before it that matter, less those of these alone.
  (Counted so, a pair of steps counts once, in the slice that holds the later one.)

A code that weighs a share over many steps (REW004) weighs it in each slice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from lineage.checks.digest import Chosen, Digest
from lineage.checks.flat import Flat, Int64, dictionary, indices
from lineage.checks.row_groups import RowGroups
from lineage.checks.window import beside
from lineage.traces.trace import row_ids

#: facts of one slice
SLICE_FACTS = 16_000_000
#: facts of the steps that may stand beside a slice for a common key
BESIDE_FACTS = SLICE_FACTS
#: what says where a row stands
LIGHT = ("run_id", "global_steps", "process", "seq", "time_ns", "partition", "field", "n")
_KEYED = pa.array(["trajectory", "prompt"])


@dataclass(frozen=True)
class Step:
    """A complete step of a run.

    Attributes:
        run: which run, from 0.
        number: ``global_steps``; None where rows have none.
        facts: elements of its rows.
    """

    run: int
    number: int | None
    facts: int


@dataclass(frozen=True)
class Slice:
    """Consecutive steps and what they are judged beside, by ``step_id``.

    Attributes:
        own: steps judged.
        before: earlier ones beside them.
        after: later ones beside them, for a common key.
        apart: steps that share a key and are too many to stand beside them.
    """

    own: frozenset[int]
    before: frozenset[int]
    after: frozenset[int]
    apart: frozenset[int]


@dataclass(frozen=True)
class Index:
    """What one light pass over a trace says.

    Attributes:
        rows: rows of the whole trace, those of unseen steps included.
        facts: their elements.
        fields: names of fields with a row in a complete step.
        steps: by ``step_id``, from 1, in order.
    """

    rows: int
    facts: int
    fields: frozenset[str]
    steps: dict[int, Step]
    _rids: Int64  # of rows of complete steps, ascending
    _step_ids: Int64
    _groups: Int64  # (rows, 2): source and row group
    _sharing: tuple[frozenset[int], ...]  # steps that have a key in common

    def slices(self) -> Iterator[Slice]:
        """The steps in slices of at most :data:`SLICE_FACTS`, at least one step each."""
        own: list[int] = []
        held = 0
        for step_id, step in self.steps.items():
            if own and held + step.facts > SLICE_FACTS:
                yield self._slice(own)
                own, held = [], 0
            own.append(step_id)
            held += step.facts
        if own:
            yield self._slice(own)

    def chosen(self, steps: Collection[int]) -> Chosen:
        """The rows of these steps."""
        wanted = np.isin(self._step_ids, np.fromiter(steps, np.int64, len(steps)))
        return Chosen(frozenset(map(tuple, np.unique(self._groups[wanted], axis=0).tolist())), self._rids[wanted])

    def _slice(self, own: list[int]) -> Slice:
        sharing = frozenset[int]().union(*(steps for steps in self._sharing if not steps.isdisjoint(own)))
        near = sorted(sharing.difference(own), key=lambda step_id: min(abs(step_id - one) for one in (own[0], own[-1])))
        held = np.cumsum([self.steps[step_id].facts for step_id in near])
        kept = set(near[: int(np.searchsorted(held, BESIDE_FACTS, side="right"))])
        among = {step_id for run in self._runs(own) for step_id in self._beside(run, own, kept)}
        return Slice(
            own=frozenset(own),
            before=frozenset(step_id for step_id in among if step_id < own[0]),
            after=frozenset(step_id for step_id in among if step_id > own[-1]),
            apart=frozenset(near) - among,
        )

    def _runs(self, own: Sequence[int]) -> list[int]:
        return [run for run, _ in groupby(self.steps[step_id].run for step_id in own)]

    def _beside(self, run: int, own: Collection[int], kept: Collection[int]) -> list[int]:
        ids = {step.number: step_id for step_id, step in self.steps.items() if step.run == run}
        mine = {number for number, step_id in ids.items() if step_id in own}
        return [ids[number] for number in beside(list(ids), mine, lambda number: ids[number] in kept)]


def facts_of(sources: Sequence[RowGroups]) -> int:
    """About how many facts a trace has, by the footers of its files alone."""
    return sum(source.facts() for source in sources)


@dataclass(frozen=True)
class _Light:
    """What one row group gives to the index."""

    rows: pa.Table  # LIGHT, with rid, source, row group
    keys: Int64  # ids of its keys, a key once a step
    places: tuple[tuple[str | None, int | None], ...]  # run and step
    which: Int64  # of each of ``keys``, its place


def light(sources: Sequence[RowGroups], threads: int) -> list[_Light]:
    """The rows of a trace without their elements, and the keys of each step."""
    tasks = [(source, group) for source in sources for group in range(len(source.first_row) - 1)]
    with ThreadPoolExecutor(max_workers=max(1, threads)) as pool:
        return list(pool.map(lambda task: _light(*task), tasks))


def _light(source: RowGroups, group: int) -> _Light:
    table = source.read(group, (*LIGHT, "entity", "key"))
    count = table.num_rows
    names = {name: table[name] if name in table.column_names else pa.nulls(count) for name in (*LIGHT, "entity")}
    whose = pa.table([names["run_id"], names["global_steps"]], ["run_id", "global_steps"])
    distinct = whose.group_by(["run_id", "global_steps"]).aggregate([])
    places = tuple(zip(*(distinct[name].to_pylist() for name in whose.column_names), strict=True))
    number = {place: at for at, place in enumerate(places)}
    pairs = zip(*(whose[name].to_pylist() for name in whose.column_names), strict=True)
    of_row = np.fromiter((number[pair] for pair in pairs), np.int64, count)
    keys, which = _keys(table, of_row, places, names["entity"])
    rows = pa.table(
        {name: names[name] for name in LIGHT}
        | {
            "rid": pa.array(row_ids(source.number, int(source.first_row[group]), count)),
            "source": pa.array(np.full(count, source.number)),
            "row_group": pa.array(np.full(count, group)),
        }
    )
    return _Light(rows, keys, places, which)


def _keys(
    table: pa.Table, of_row: Int64, places: Sequence[tuple[str | None, int | None]], entity: pa.Array
) -> tuple[Int64, Int64]:
    """Every key of every step once: its id (its run's and its own hash), and the step's place."""
    lists = Flat.of(table, "key")
    distinct = dictionary(lists.values)
    numbers = np.fromiter(map(hash, distinct.to_pylist()), np.int64, len(distinct))
    salts = np.fromiter((hash(run) for run, _ in places), np.int64, len(places))
    wanted = np.asarray(pc.fill_null(pc.is_in(entity, value_set=_KEYED), False).to_numpy(zero_copy_only=False))
    there = np.repeat(wanted, lists.counts)
    used: NDArray[np.bool_] = np.zeros(len(places) * len(distinct), dtype=bool)
    used[(np.repeat(of_row, lists.counts) * len(distinct) + indices(lists.values))[there]] = True
    which, at = np.divmod(np.flatnonzero(used), max(1, len(distinct)))
    return numbers[at] ^ salts[which], which


def index(con: duckdb.DuckDBPyConnection, found: Sequence[_Light]) -> Index:
    """Put the light pass together.

    Args:
        con: holds ``digest_events`` (the rows of the light pass) and ``places`` of them.
        found: what :func:`light` gave.
    """
    placed = con.sql("select rid, step_id, source, row_group from digest_events join places using (rid) order by rid")
    columns = placed.fetchnumpy()
    said = con.sql(
        """select step_id, any_value(dense_run) as run, any_value(run_id) as run_id, any_value(global_steps) as step,
            sum(n) as facts
        from (select *, dense_rank() over (order by run_id) - 1 as dense_run from digest_events)
        join places using (rid) group by step_id order by step_id"""
    ).fetchall()
    steps = {step_id: Step(int(run), number, int(facts or 0)) for step_id, run, _, number, facts in said}
    numbers = {(run_id, number): step_id for step_id, _, run_id, number, _ in said}
    fields = con.sql("select distinct field from digest_events join places using (rid)").fetchall()
    rows, facts = con.sql("select count(*), sum(n) from digest_events").fetchall()[0]
    return Index(
        rows=int(rows),
        facts=int(facts or 0),
        fields=frozenset(name for (name,) in fields),
        steps=steps,
        _rids=columns["rid"].astype(np.int64),
        _step_ids=columns["step_id"].astype(np.int64),
        _groups=np.column_stack([columns["source"], columns["row_group"]]).astype(np.int64),
        _sharing=_sharing(found, numbers),
    )


def _sharing(found: Sequence[_Light], numbers: dict[tuple[str | None, int | None], int]) -> tuple[frozenset[int], ...]:
    """The distinct sets of steps that have a key in common."""
    ids, steps = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for one in found:
        step_ids = np.fromiter((numbers.get(place, 0) for place in one.places), np.int64, len(one.places))
        ids.append(one.keys)
        steps.append(step_ids[one.which])
    key, step = np.concatenate(ids), np.concatenate(steps)
    order = np.lexsort((step, key))
    key, step = key[order], step[order]
    fresh = np.ones(len(key), dtype=bool)
    fresh[1:] = (key[1:] != key[:-1]) | (step[1:] != step[:-1])
    key, step = key[fresh & (step > 0)], step[fresh & (step > 0)]
    starts = np.flatnonzero(np.diff(key, prepend=key[:1] ^ 1)) if len(key) else np.empty(0, np.int64)
    counts = np.diff(starts, append=len(key))
    many = counts > 1
    several = (step[start : start + count] for start, count in zip(starts[many], counts[many], strict=True))
    return tuple({frozenset(one.tolist()) for one in several})


#: elements that codes that look at the whole run may ask for
_RUN_CELLS = ("group_cells", "param_cells", "dataset_cells")


def run_tables(found: Digest, own: Chosen) -> Digest:
    """What of a slice's own rows is kept to the end of the run: no content of trajectories."""
    cells = {
        name: _of(table, own).combine_chunks() if name in _RUN_CELLS else table.slice(0, 0)
        for name, table in found.cells.items()
    }
    ids = np.unique(np.concatenate([cells[name]["id"].to_numpy() for name in _RUN_CELLS]))
    names = found.names.filter(pa.array(np.isin(found.names["id"].to_numpy(), ids)))
    events = _of(found.events, own).combine_chunks()
    return Digest(events, found.keyed.slice(0, 0), names, found.content.slice(0, 0), cells, found.seen)


def joined(parts: Sequence[Digest]) -> Digest:
    """Slices put one behind the other."""

    def all_of(tables: Sequence[pa.Table]) -> pa.Table:
        return pa.concat_tables(tables, promote_options="permissive")

    return Digest(
        events=all_of([part.events for part in parts]),
        keyed=all_of([part.keyed for part in parts]),
        names=all_of([part.names for part in parts]),
        content=all_of([part.content for part in parts]),
        cells={name: all_of([part.cells[name] for part in parts]) for name in parts[0].cells},
        seen=frozenset[str]().union(*(part.seen for part in parts)),
    )


def _of(table: pa.Table, own: Chosen) -> pa.Table:
    return table.filter(pa.array(own.among(table["rid"].to_numpy())))
