"""Where runs lie, seen from the folder the command line is started in."""

from __future__ import annotations

from pathlib import Path

RUNS = Path("runs")
LATEST_RUN = RUNS / "latest"  # lineage.run.LATEST, written out: that module loads pyarrow, and help should not
