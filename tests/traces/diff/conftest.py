"""The small trace, for every test of this folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
if str(_HERE) not in sys.path:
    sys.path.insert(0, str(_HERE))

from two_steps import small, write  # noqa: E402


@pytest.fixture
def rows():
    """The rows of two small steps."""
    return small()


@pytest.fixture
def trace(rows, tmp_path):
    """Writes rows as a trace; without any, those of the small steps."""
    return lambda name="a", changed=None, **meta: write(tmp_path / f"{name}.parquet", changed or rows, **meta)
