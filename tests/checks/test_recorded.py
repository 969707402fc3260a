"""The trace of the benchmarks: copies of a recorded step are clean, and every tool finds what is put into them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import recorded
import side_by_side
import synthetic

from lineage.checks import Kind, check

SAMPLE = Path(__file__).parents[2] / "traces" / "samples" / "good.parquet"


@pytest.fixture(scope="module")
def source() -> recorded.Recorded:
    return recorded.Recorded.of(SAMPLE)


@pytest.mark.slow
def test_copies_of_a_step_are_steps_of_their_own_and_clean(source, tmp_path) -> None:
    tables = [table for table, _ in source.tables(6000)]
    whole = pa.concat_tables(tables).replace_schema_metadata(synthetic.metadata(source.config))
    pq.write_table(whole, tmp_path / "trace.parquet")
    report = check(tmp_path / "trace.parquet")
    assert report.headline is None
    assert report.steps == len(tables) > 5
    assert sum(one.kind is Kind.PASS for one in report.verdicts) > 0.8 * len(report.verdicts)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_every_tool_finds_what_is_put_in(share, source, tmp_path) -> None:
    path = tmp_path / "trace.parquet"
    _, made = side_by_side.write(path, 6000, share, source)
    assert (made.total() > 0) == (share > 0)
    for tool in side_by_side.TOOLS:
        found = import_module(f"rivals.{tool}_rules").violations(path, 1)
        assert {rule: count for rule, count in found.items() if count} == dict(+made), tool
