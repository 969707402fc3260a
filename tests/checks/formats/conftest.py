"""One trace of each sort, judged once for all formats, by a few codes: a format does not care which."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))

import synthetic

from lineage.checks.gate import Gate
from lineage.checks.report import Outcome
from lineage.checks.settings import Settings

SAMPLES = Path(__file__).parents[3] / "traces" / "samples"
CODES = ("ADV001", "KEY001", "KEY002", "MSK001", "MSK002", "TOK001")


@pytest.fixture(scope="session")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Outcomes by name: good, bad (MSK002), incomplete, empty (no row), missing (no file)."""
    folder = tmp_path_factory.mktemp("formats")
    rows = [row for step in synthetic.steps(3, synthetic.small(padding=4)) for row in step]
    paths = {
        "good": SAMPLES / "good.parquet",
        "bad": SAMPLES / "bad" / "MSK002.parquet",
        "incomplete": synthetic.write_rows(folder / "torn.parquet", rows, {"torn": [3], "closed": False}),
        "empty": folder / "empty.parquet",
        "missing": folder / "missing.parquet",
    }
    pq.write_table(pq.read_table(paths["good"]).slice(0, 0), paths["empty"])
    outcomes = Gate.of(Settings(select=CODES)).judge_all(paths.values())
    return dict(zip(paths, outcomes, strict=True))
