"""The schema is frozen: these columns, types and metadata keys, and a trace of this version that every later one reads.

If a column must be added, changed or removed: raise ``SCHEMA_VERSION``, keep reading version 1 (a column it lacks is a
typed null in the views), add ``tests/data/v2/`` beside ``v1/``, and only then write ``frozen_schema.json`` anew. The
traces under ``tests/data/v1/`` are never made again.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lineage import schema as frozen
from lineage.checks import Kind, check
from lineage.traces import open_trace
from lineage.traces.trace import VIEWS

V1 = Path(__file__).parents[1] / "data" / "v1"
PINNED = json.loads((Path(__file__).parents[1] / "lineage" / "frozen_schema.json").read_text())
CODES = {
    "ADV001", "BAT001", "KEY001", "KEY002", "KEY003", "LEN001", "LEN002", "LEN003", "MSK001", "MSK002", "PAD001",
    "PAD002", "QUE001", "QUE002", "QUE003", "TOK001", "TOP001", "TOP003",
}  # fmt: skip


def test_the_schema_is_what_was_frozen():
    """Names, Arrow types and order of the columns, and the keys of the file's metadata."""
    now = {
        "schema_version": frozen.SCHEMA_VERSION,
        "metadata": [
            key.decode()
            for key in (
                frozen.META_VERSION,
                frozen.META_RUN,
                frozen.META_CONFIG,
                frozen.META_STATE,
                frozen.META_SEGMENT,
            )
        ],
        "columns": [[field.name, str(field.type)] for field in frozen.schema()],
    }
    assert now == PINNED


def test_a_good_trace_of_version_1_passes():
    """Every code of the version that wrote it still finds something to examine, and passes."""
    report = check(V1 / "good.parquet", select=sorted(CODES))
    assert {verdict.code: verdict.kind for verdict in report.verdicts} == dict.fromkeys(CODES, Kind.PASS)
    assert (report.rows, report.facts, report.steps) == (330, 1672, 2)


@pytest.mark.slow
def test_a_good_trace_of_version_1_breaks_no_later_code():
    """What later versions record is not missed in it."""
    assert check(V1 / "good.parquet").exit_code == 0


@pytest.mark.slow
def test_a_bad_trace_of_version_1_is_blamed_as_it_was():
    """MSK002 in the actor's update of step 2, and nothing else of that version's codes."""
    report = check(V1 / "MSK002.parquet")
    assert report.headline is not None
    violation = report.headline.violation
    assert (report.headline.invariant.code, violation.stage, violation.global_steps) == ("MSK002", "update_actor", 2)
    assert {verdict.code for verdict in report.verdicts if verdict.kind is Kind.FAIL} & CODES == {"MSK002"}


@pytest.mark.parametrize("name", ["good", "MSK002"])
def test_every_view_reads_a_trace_of_version_1(name):
    """No view is empty, and none has lost a column of the schema."""
    with open_trace(V1 / f"{name}.parquet") as trace:
        counts = {view: trace.sql(f'select count(*) from "{view}"').fetchall()[0][0] for view in VIEWS}
        assert counts["rows"] == 330
        assert counts["facts"] == 1672
        assert (counts["steps"], counts["groups"] > 0, counts["trajectories"] > 0) == (3, True, True)
        assert trace.rows.columns == [name for name, _ in PINNED["columns"]]
