"""The views of a trace, and the fence round them."""

from __future__ import annotations

import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from lineage.schema import COLUMNS
from lineage.traces import TraceError, life, open_trace


@pytest.fixture
def trace(trace_file):
    with open_trace(trace_file) as opened:
        yield opened


def test_facts_are_the_elements_of_rows(trace):
    """One fact per element: as many as the rows say, each with its own key."""
    assert trace.sql("select count(*) from facts").fetchall()[0] == trace.sql('select sum(n) from "rows"').fetchall()[0]
    row = trace.sql("select key, valid_length from \"rows\" where field = 'responses' and op = 'produce' limit 1")
    keys, lengths = row.fetchall()[0]
    found = trace.sql(
        "select key, valid_length from facts where field = 'responses' and op = 'produce' and stage = 'rollout' "
        "and global_steps = 1 order by i"
    ).fetchall()
    assert found == list(zip(keys, lengths, strict=True))


def test_trajectories_hold_lengths_that_add_up(trace):
    """prompt_len + response_len = seq_len and policy_len <= response_len for every trajectory; padding is known."""
    rows = trace.sql("select prompt_len, response_len, seq_len, policy_len, is_padding from trajectories").fetchall()
    assert len(rows) == 2 * (8 + 4)
    assert all(p + r == s and m <= r for p, r, s, m, _ in rows)
    assert sum(padding for *_, padding in rows) == 8
    assert trace.sql("select count(*) from trajectories where reward is null").fetchall()[0] == (0,)


def test_groups_count_sessions_against_what_was_declared(trace):
    """Every real group has its two sessions, and the last status it was given."""
    groups = trace.sql("select sessions, expected, status from groups where not is_padding").fetchall()
    assert groups == [(2, 2, "finished")] * 8


def test_steps_sum_up_the_run(trace):
    """One row per step, the rows before the first step included."""
    steps = trace.sql("select global_steps, trajectories, real_trajectories from steps").fetchall()
    assert steps == [(0, 0, 0), (1, 12, 8), (2, 12, 8)]


def test_pandas_on_request(trace):
    """``df`` gives a data frame of the query."""
    assert trace.df("select avg(policy_len) as mean from trajectories group by global_steps").shape == (2, 1)


def test_absent_columns_are_typed_nulls(trace_file, tmp_path):
    """An older or foreign file opens: what it lacks is null, of the right type, and known as absent."""
    older = tmp_path / "older.parquet"
    pq.write_table(pq.read_table(trace_file).drop_columns(["topology", "is_padding", "data_source"]), older)
    with open_trace(older) as trace:
        assert trace.absent == {"topology", "is_padding", "data_source"}
        assert trace.sql('select count(topology), count(is_padding) from "rows"').fetchall()[0] == (0, 0)
        assert trace.rows.columns[: len(COLUMNS)] == [column.name for column in COLUMNS]
        assert trace.sql("select bool_or(is_padding) from trajectories").fetchall()[0] == (False,)


@pytest.mark.parametrize(
    "query",
    [
        "select * from read_text('/etc/passwd')",
        "select * from read_csv('/etc/passwd')",
        "select * from '/etc/passwd'",
        "attach 'elsewhere.db'",
        "copy (select 1) to 'lineage-out.csv'",
        "install httpfs",
        "set enable_external_access = true",
        "set allowed_paths = ['/etc/passwd']",
        "select nonsense from rows",
    ],
)
def test_user_sql_reads_this_trace_and_nothing_else(query, trace):
    """Other files, other databases and the settings themselves are refused, in one line."""
    with pytest.raises(TraceError) as caught:
        trace.sql(query).fetchall()
    assert "\n" not in str(caught.value)
    assert trace.sql('select count(*) from "rows"').fetchall()[0][0] > 0


def test_a_life_runs_from_the_dataset_row_to_the_weight_sync(trace):
    """A group's life starts at its dataset row, passes every trajectory, and ends in the synced weights."""
    uid = trace.sql("select uid from groups where not is_padding and global_steps = 1").fetchall()[0][0]
    found = life(trace, uid)
    stages = [event.stage for event in found.events]
    assert (stages[0], stages[-1]) == ("dataset", "weight_sync")
    assert len(found.keys) == 2
    assert {"prompt", "rollout", "advantage", "update_actor", "clear"} <= set(stages)


def test_a_trajectory_has_a_life_of_its_own(trace):
    """A trajectory key shows that trajectory and its group's prompt, not its siblings."""
    key = trace.sql("select key from trajectories where not is_padding").fetchall()[0][0]
    found = life(trace, key)
    assert found.keys == (key,)
    assert any(event.field == "responses" and event.mask_sum is not None for event in found.of(key))
    with pytest.raises(TraceError, match="no trajectory and no uid 'nobody'"):
        life(trace, "nobody")


def test_no_progress_is_drawn_between_our_lines(trace_file):
    """DuckDB draws a bar on standard output where Python has no script, as in ``python -c`` and notebooks."""
    asked = "from duckdb_settings() select value where name = 'enable_progress_bar'"
    code = f"import lineage; print(lineage.open({str(trace_file)!r}).fetch({asked!r})[1])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[('false',)]\n"
