"""For every test: property tests without a clock, a small clean trace, and the folder of its generator."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

_BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
if str(_BENCHMARKS) not in sys.path:
    sys.path.insert(0, str(_BENCHMARKS))

import synthetic  # noqa: E402

from lineage import hooks  # noqa: E402

# a shell that starts the tests in its background has them, and every command they try, ignore Ctrl-C
signal.signal(signal.SIGINT, signal.default_int_handler)

# a shared machine may be slow at any moment, so property tests are not timed
settings.register_profile("lineage", deadline=None)
settings.load_profile("lineage")


@pytest.fixture(scope="session")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean two-step trace with padding."""
    rows = [row for step in synthetic.steps(2, synthetic.small(padding=4)) for row in step]
    return synthetic.write_rows(tmp_path_factory.mktemp("trace") / "trace.parquet", rows)


@pytest.fixture(autouse=True)
def no_recorder_left() -> Iterator[None]:
    """A recorder that a test leaves installed would record, and judge, the steps of the next one."""
    yield
    hooks.install(hooks.NullRecorder())
