"""A report as JSON: for programs. What each name holds is in ``docs/report.md``; none goes away within a format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lineage.checks.report import Outcome, Refused, Report
from lineage.checks.verdict import Verdict, Violation

FORMAT_VERSION = 1


def render(outcomes: Sequence[Outcome], quiet: bool = False) -> str:
    """One JSON object for one trace, a list of them for several; in ASCII, whatever the trace says.

    Args:
        outcomes: of all traces.
        quiet: makes no difference here.
    """
    said = [_refused(one) if isinstance(one, Refused) else to_dict(one) for one in outcomes]
    return json.dumps(said[0] if len(said) == 1 else said, indent=2)


def _refused(refused: Refused) -> dict[str, Any]:
    return {
        "format": FORMAT_VERSION,
        "path": str(refused.path),
        "error": refused.message,
        "exit_code": int(refused.exit_code),
    }


def to_dict(report: Report) -> dict[str, Any]:
    """The report as plain dictionaries and lists."""
    head = report.headline
    return {
        "format": FORMAT_VERSION,
        "path": str(report.path),
        "run_id": report.run_id,
        "profile": report.profile.name,
        "rows": report.rows,
        "facts": report.facts,
        "steps": report.steps,
        "incomplete": report.state or None,
        "exit_code": int(report.exit_code),
        "headline": None
        if head is None
        else {
            "code": head.invariant.code,
            "name": head.invariant.name,
            "says": head.invariant.says,
            "causes": head.invariant.causes,
            "violation": _violation(head.violation),
            "keys": list(head.keys),
            "violations": head.count,
            "consequences": [
                {"code": one.code, "violations": one.count, "follows": one.follows or None} for one in head.consequences
            ],
            "change": head.change and asdict(head.change),
        },
        "verdicts": [_verdict(verdict, report.name(verdict.code)) for verdict in report.verdicts],
        "complaints": list(report.complaints),
        "notes": list(report.notes),
        "seconds": round(report.seconds, 3),
    }


def _verdict(verdict: Verdict, name: str) -> dict[str, Any]:
    return {
        "code": verdict.code,
        "name": name,
        "verdict": verdict.kind.value,
        "examined": verdict.examined,
        "violations": verdict.errors,
        "accepted": verdict.accepted,
        "warnings": verdict.warnings,
        "needed": verdict.needed or None,
        "first": _violation(verdict.first) if verdict.first is not None else None,
    }


def _violation(violation: Violation) -> dict[str, Any]:
    return {name: getattr(violation, name) for name in Violation.__dataclass_fields__ if name != "ord"}
