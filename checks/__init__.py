"""checks: the invariant catalogue and its runner.

What enters: an open trace. What leaves: one verdict per invariant and a report that names the first bad event. Imports
traces and lineage's schema, never torch; cli may import it, and so may any CI gate. Names are loaded when they are
first used: pytest imports the plugin below this package in every session, and that must cost nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lineage.checks.baseline import Baseline as Baseline
    from lineage.checks.catalogue import Invariant as Invariant
    from lineage.checks.catalogue import select as select
    from lineage.checks.engine import judge as judge
    from lineage.checks.gate import Gate as Gate
    from lineage.checks.gate import check as check
    from lineage.checks.own import Finding as Finding
    from lineage.checks.own import Tables as Tables
    from lineage.checks.plugins import hookimpl as hookimpl
    from lineage.checks.plugins import invariant as invariant
    from lineage.checks.report import Refused as Refused
    from lineage.checks.report import Report as Report
    from lineage.checks.settings import Settings as Settings
    from lineage.checks.verdict import ExitCode as ExitCode
    from lineage.checks.verdict import Kind as Kind
    from lineage.checks.verdict import Verdict as Verdict
    from lineage.checks.verdict import Violation as Violation

_LAZY = {
    "Baseline": "baseline",
    "ExitCode": "verdict",
    "Finding": "own",
    "Gate": "gate",
    "Invariant": "catalogue",
    "Kind": "verdict",
    "Refused": "report",
    "Report": "report",
    "Settings": "settings",
    "Tables": "own",
    "Verdict": "verdict",
    "Violation": "verdict",
    "check": "gate",
    "hookimpl": "plugins",
    "invariant": "plugins",
    "judge": "engine",
    "select": "catalogue",
}

__all__ = [
    "Baseline",
    "ExitCode",
    "Finding",
    "Gate",
    "Invariant",
    "Kind",
    "Refused",
    "Report",
    "Settings",
    "Tables",
    "Verdict",
    "Violation",
    "check",
    "hookimpl",
    "invariant",
    "judge",
    "select",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
