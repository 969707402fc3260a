"""The tables the invariants are written over, made once per trace.

``events``: one row per trace row of a complete step, in order (``ord``), with the digest's signatures.
``key_cells`` and the others of ``cells.py``: elements of the rows that need no suspicion, with their row's scalars.
``keys``: every key once, as ``id``, parsed from the right into ``uid``, ``session_id``, ``index``.
``keyed``: the distinct key lists, as ``k`` and ``id``.
``base``: one row per trajectory: whose it is (``group_id``, ``session_id``, ``index``) and its content as the rollout
wrote it, against which later rows are held. (The text of its key is in ``keys`` alone: only what fails prints it.)
``expected``: the signatures a row with key list ``k`` has when it agrees with ``base``.
``suspects`` and ``elements``: an invariant names rows by ``rid`` in the first and reads their elements in the second.
``config`` and ``profile``: what the run and its profile declare, by name (see ``declared.py``).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from weakref import WeakSet

import pyarrow as pa

from lineage.checks.cells import CELLS, PLACE
from lineage.checks.declared import config_table, macros
from lineage.checks.desk import Desk, Shared, statements, words
from lineage.checks.digest import SCALARS, Chosen, Digest, digest, opened, run_number
from lineage.checks.profiles import Profile
from lineage.checks.slices import Index, index, light
from lineage.traces.trace import Trace, facts_of

_TABLES = Path(__file__).parent / "tables"
# A table is made of such as stand before it.
_ORDER = ("events", "content", "turns", "groups", "metrics", "scores")
_TABLE = "create or replace table"  # of all desks: a temporary one would be of its connection
_RUNS = pa.schema([("run_id", pa.string()), ("run", pa.int64())])
# What every estimator of a KL, summed over n tokens, lies between, of log-probs at most m apart and d apart in all.
_KL_BOUNDS = (
    """create or replace temp macro kl_least(kind, d, m, n) as
    case when kind in ('kl', 'k1') then -d when kind = 'abs' then d
        when kind in ('mse', 'k2') then d * d / (2 * n) else exp(-m) * d * d / (2 * n) end""",
    """create or replace temp macro kl_most(kind, d, m) as
    case when kind in ('kl', 'k1', 'abs') then d
        when kind in ('mse', 'k2') then m * d / 2 else exp(m) * m * d / 2 end""",
)
_SUSPECTED = (
    "(select s.*, r.run from stored as s join run_numbers as r on s.run_id is not distinct from r.run_id"
    " where rid in (select rid from suspects))"
)
_ELEMENTS = (
    "create or replace temp table suspects (rid bigint)",
    f"create or replace temp view suspect_elements as {facts_of(_SUSPECTED, 'rid, run, ')}",
)
_NO_ELEMENTS = "create or replace table no_elements as select * from suspect_elements limit 0"
_UNSEEN = pa.schema([("run_id", pa.string()), ("step", pa.int64())])
# Traces whose connection has what does not depend on their rows, or tables: it may be asked again.
_FURNISHED: WeakSet[Trace] = WeakSet()
_VIEWED: WeakSet[Trace] = WeakSet()


class Workbench(Desk):
    """The tables of one trace, or of a slice of it; its own fenced connection is the first desk to ask them.

    Args:
        trace: whose.
        profile: whose conventions it follows.
        threads: to read with.
        whole: read all of it now; else :meth:`lay` says what.
        places: how many desks there are.

    Attributes:
        desks: this one first.
        sources: its row groups.
        fields: fields with at least one row in a step that is laid out.
    """

    def __init__(self, trace: Trace, profile: Profile, threads: int = 2, whole: bool = True, places: int = 1) -> None:
        super().__init__(trace.connection, Shared())
        self.trace, self.profile, self.threads = trace, profile, threads
        self.desks: tuple[Desk, ...] = (self,)
        self._places = places
        self.sources = opened(trace.batches or trace.source.files)
        self.fields: frozenset[str] = frozenset()
        self._placed = False
        unseen = [{"run_id": run_id, "step": step} for run_id, step in trace.source.unseen]
        self._unseen = pa.Table.from_pylist(unseen, _UNSEEN)
        if whole:
            self.lay(self.read())

    def read(self, chosen: Chosen | None = None) -> Digest:
        """Digest these rows of the trace; all when None."""
        return digest(self.sources, self.threads, self.trace.source.unseen, chosen)

    def index(self) -> Index:
        """Place every row in the whole trace: what is laid out from now on are slices of it."""
        found = light(self.sources, self.threads)
        self._show_rows(pa.concat_tables([one.rows for one in found], promote_options="permissive"))
        self.run(_statements()[0])
        self._placed = True
        self._furnish()
        return index(self.con, found)

    def lay(self, found: Digest, judged: frozenset[int] | None = None) -> None:
        """Make the tables of these rows.

        Args:
            found: what was read.
            judged: ids of the steps whose violations count; all when None.
        """
        self.digest, self.shared.judged = found, judged
        self._show_rows(found.events)
        self._furnish()  # before the tables: some of them follow what the run declares
        self._fill()
        self.fields = frozenset(self._judged_fields())

    def close(self) -> None:
        """Leave the trace with the connection it came with."""
        for desk in self.desks[1:]:
            desk.con.close()
        self.desks = (self,)

    def _show_rows(self, rows: pa.Table) -> None:
        """Let ``digest_events`` be these rows, and ``run_numbers`` their runs."""
        runs = rows["run_id"].unique().to_pylist()
        numbers = [{"run_id": run_id, "run": run_number(run_id or "")} for run_id in runs]
        self._rows = {
            "digest_events": rows,
            "run_numbers": pa.Table.from_pylist(numbers, _RUNS),
            "unseen": self._unseen,
        }
        self.shared.plan({})
        self.show(self._rows)

    def _fill(self) -> None:
        """Lay the rows out; a trace whose rows are replaced gets other ones."""
        found = self.digest
        shown = {
            **self._rows,
            "digest_content": found.content,
            "digest_first": found.first(),
            "digest_names": found.names,
            "keyed": found.keyed,
            **{f"digest_{name}": cells for name, cells in found.cells.items()},
        }
        for desk in self.desks:
            desk.show(shown)
        places, drop_word, word, events, *rest = _statements()
        if self.trace in _VIEWED:
            for name in (*CELLS, *_named_tables()):
                self.con.execute(f"drop table if exists {name}")
        for statement in (*(() if self._placed else (places,)), drop_word, word, events):
            self.run(statement)
        _VIEWED.add(self.trace)
        kept = {cells: f"{_TABLE} {cells} as {_placed(cells)}" for cells in CELLS}
        self.shared.plan(kept | dict(zip(_named_tables(), rest, strict=True)))

    def make_all(self) -> None:
        """Make every table now: for who asks the connection itself."""
        self.need((*CELLS, *_named_tables()))

    def _furnish(self) -> None:
        """What does not depend on the rows."""
        runs = [name for (name,) in self.run("select distinct coalesce(run_id, '') from digest_events")]
        furniture = (*macros(runs), *_KL_BOUNDS, *_ELEMENTS)
        if self.trace not in _FURNISHED:
            # tables of DuckDB's own: every setting asked for would scan an Arrow table anew
            declared = {"config": config_table(self.trace.source, runs), "profile": self.profile.table()}
            for name, table in declared.items():
                self.con.register(f"declared_{name}", table)
                self.con.execute(f"create or replace table {name} as select * from declared_{name}")
                self.con.unregister(f"declared_{name}")
            self.furnish((*furniture, _NO_ELEMENTS))
            _FURNISHED.add(self.trace)
        while len(self.desks) < self._places:
            desk = Desk(self.con.cursor(), self.shared)
            desk.show(self._rows)
            desk.furnish(furniture)
            self.desks += (desk,)

    def _judged_fields(self) -> list[str]:
        return [name for (name,) in self.run("select distinct field from events")]

    def recorded(self, column: str) -> bool:
        """True when some row of the trace says something in this column."""
        if column in SCALARS:
            values = self.digest.events[column]
            return bool(values.null_count < len(values))
        return column in self.digest.seen


@cache
def _statements() -> tuple[str, ...]:
    return tuple(one for name in _ORDER for one in statements((_TABLES / f"{name}.sql").read_text("utf-8")))


@cache
def _named_tables() -> tuple[str, ...]:
    """Names of the tables that are made when they are first asked for, in their order."""
    return tuple(words(statement.removeprefix(_TABLE))[0] for statement in _statements()[4:])


def _placed(cells: str) -> str:
    """A query for elements, each with the scalars of its row."""
    place = ", ".join(f"e.{name}" for name in PLACE)
    return f"select c.*, {place} from digest_{cells} as c join events as e using (rid)"
