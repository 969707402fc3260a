"""checks: the invariant catalogue and its runner.

What enters: an open trace. What leaves: one verdict per invariant and a report that names the first bad event. Imports
traces and lineage's schema, never torch; cli may import it, and so may any CI gate.
"""

from __future__ import annotations

from lineage.checks.catalogue import Invariant, catalogue, select
from lineage.checks.engine import Report, check, check_path
from lineage.checks.verdict import ExitCode, Kind, Verdict, Violation

__all__ = [
    "ExitCode",
    "Invariant",
    "Kind",
    "Report",
    "Verdict",
    "Violation",
    "catalogue",
    "check",
    "check_path",
    "select",
]
