"""Violations put into a clean trace, a given share of its trajectories for each of the five rules of ``rivals``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lineage.schema import COLUMNS

#: numbers of events left free after each step, for the rows put in
ROOM = 10
_LISTED = [column.name for column in COLUMNS if column.listed]


class Breaker:
    """Breaks one step's table after another.

    Args:
        share: of the trajectories, for each rule.

    Attributes:
        made: how many keys break each rule by now.
    """

    def __init__(self, share: float, seed: int = 0) -> None:
        self.share = share
        self.made: Counter[str] = Counter()
        self._rng = np.random.default_rng(seed)
        self._steps = 0

    def broken(self, table: pa.Table) -> pa.Table:
        """The step with violations in it."""
        first, last = (how(table["seq"]).as_py() + self._steps * ROOM for how in (pc.min, pc.max))
        moved = pc.add(table["seq"], self._steps * ROOM)
        table = table.set_column(table.schema.get_field_index("seq"), "seq", moved).combine_chunks()
        self._steps += 1
        assert first <= last
        rows = {
            "alignment": _row(table, "metrics", "consume", "returns"),
            "groups": _row(table, "sample", "produce", "key"),
            "conservation": _row(table, "clear", "clear", "status"),
            "advantage": _row(table, "advantage", "forward", "advantages"),
        }
        edits: dict[int, pa.Table] = {}
        chosen = {rule: self._some(table, row) for rule, row in rows.items()}
        chosen["groups"] = self._one_a_uid(table, rows["groups"], chosen["groups"])
        edits[rows["alignment"]] = _changed(table, rows["alignment"], chosen["alignment"], valid_length=1)
        edits[rows["groups"]] = _without(table, rows["groups"], chosen["groups"])
        edits[rows["conservation"]] = _without(table, rows["conservation"], chosen["conservation"])
        # far off: where all scores of a group are alike, what the rounding of float32 leaves is divided by 1e-6
        edits[rows["advantage"]] = _changed(table, rows["advantage"], chosen["advantage"], min_in=100.0, max_in=100.0)
        put = _row(table, "rollout", "tag", "status")
        late = self._some(table, put, besides=self._keys(table, rows["conservation"], chosen["conservation"]))
        ghost = _without(table, put, set(range(table["n"][put].as_py())) - set(late))
        ghost = ghost.set_column(ghost.schema.get_field_index("seq"), "seq", pa.array([last + 1], pa.int64()))
        self.made.update({rule: len(places) for rule, places in chosen.items()} | {"order": len(late)})
        parts, at = [], 0
        for row, edited in sorted(edits.items()):
            parts += [table.slice(at, row - at), edited]
            at = row + 1
        parts += [table.slice(at), *([ghost] if late else [])]
        return pa.concat_tables(parts)

    def _some(self, table: pa.Table, row: int, besides: Collection[str] = ()) -> list[int]:
        """Places of real trajectories in a row, drawn."""
        keys = table["key"][row].as_py()
        real = [at for at, key in enumerate(keys) if key not in besides and key.count("_") == 2 and len(key) == 40]
        count = min(int(self._rng.binomial(len(real), self.share)), len(real))
        return sorted(self._rng.choice(real, count, replace=False).tolist())

    def _one_a_uid(self, table: pa.Table, row: int, places: list[int]) -> list[int]:
        keys = table["key"][row].as_py()
        return sorted({keys[at].rsplit("_", 2)[0]: at for at in places}.values())

    @staticmethod
    def _keys(table: pa.Table, row: int, places: list[int]) -> set[str]:
        keys = table["key"][row].as_py()
        return {keys[at] for at in places}


def _row(table: pa.Table, stage: str, op: str, field: str) -> int:
    """Number of the last such row about trajectories."""
    wanted = {"stage": stage, "op": op, "field": field, "entity": "trajectory"}
    found = np.ones(len(table), dtype=bool)
    for name, value in wanted.items():
        found &= np.asarray(pc.equal(table[name], value).to_numpy())
    return int(np.flatnonzero(found)[-1])


def _changed(table: pa.Table, row: int, places: list[int], **changes: float) -> pa.Table:
    """The row with something added at these places of some columns."""
    one = table.slice(row, 1)
    for column, by in changes.items():
        values = one[column][0].as_py()
        for at in places:
            values[at] += by
        one = one.set_column(one.schema.get_field_index(column), column, pa.array([values], one[column].type))
    return one


def _without(table: pa.Table, row: int, places: Collection[int]) -> pa.Table:
    one, gone = table.slice(row, 1), set(places)
    count = one["n"][0].as_py()
    for name in _LISTED:
        values = one[name][0].as_py()
        if values is not None and len(values) == count:
            kept = [value for at, value in enumerate(values) if at not in gone]
            one = one.set_column(one.schema.get_field_index(name), name, pa.array([kept], one[name].type))
    left = pa.array([count - len(gone)], one["n"].type)
    return one.set_column(one.schema.get_field_index("n"), "n", left)
