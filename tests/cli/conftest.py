"""A small clean trace, and the folder of the generator."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
if str(_BENCHMARKS) not in sys.path:
    sys.path.insert(0, str(_BENCHMARKS))

import synthetic  # noqa: E402


@pytest.fixture(scope="session")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean two-step trace with padding."""
    rows = [row for step in synthetic.steps(2, synthetic.small(padding=4)) for row in step]
    return synthetic.write_rows(tmp_path_factory.mktemp("trace") / "trace.parquet", rows)
