"""Clean and broken traces for the checker's tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
for _folder in (_HERE, _HERE.parents[1] / "benchmarks"):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))

import synthetic  # noqa: E402


@pytest.fixture
def rows() -> list[synthetic.Row]:
    """Rows of a clean three-step run with padding: 8 real trajectories and 4 padding rows a step."""
    return [row for step in synthetic.steps(3, synthetic.small(padding=4)) for row in step]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write rows as a trace file and return its path."""

    def _write(rows: list[synthetic.Row], name: str = "trace.parquet", state: dict[str, object] | None = None) -> Path:
        return synthetic.write_rows(tmp_path / name, rows, state)

    return _write
