"""Where runs lie, seen from the folder the command line is started in."""

from __future__ import annotations

from pathlib import Path

from lineage.run import LATEST

RUNS = Path("runs")
LATEST_RUN = RUNS / LATEST
