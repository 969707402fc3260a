"""What a gate lets through: thresholds, required checks, incomplete traces; and the exit code that follows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from lineage.checks.verdict import ExitCode, Kind, Verdict

_WORST_FIRST = (ExitCode.INTERRUPTED, ExitCode.UNUSABLE, ExitCode.VIOLATIONS, ExitCode.INCOMPLETE, ExitCode.PASS)


class Match(StrEnum):
    """What makes a violation the one a baseline knows."""

    KEY = "key"
    SITE = "site"


@dataclass(frozen=True)
class Policy:
    """How verdicts become an exit code. It changes no verdict.

    Attributes:
        require: facts a code must have examined; fewer is as bad as a violation.
        max_violations: violations of a code that are let through.
        max_warnings: warnings, over all codes, that are let through; None lets all through.
        allow_incomplete: an incomplete trace is as good as a complete one.
        exit_zero: whatever is found, the exit code is 0.
    """

    require: Mapping[str, int] = field(default_factory=dict)
    max_violations: Mapping[str, int] = field(default_factory=dict)
    max_warnings: int | None = None
    allow_incomplete: bool = False
    exit_zero: bool = False

    def accept(self, verdict: Verdict) -> Verdict:
        """The verdict with its new violations accepted, when there are no more of them than the threshold."""
        if not verdict.new or verdict.new > self.max_violations.get(verdict.code, 0):
            return verdict
        violations = tuple(replace(one, accepted=one.severity == "error") for one in verdict.violations)
        return replace(verdict, accepted=verdict.errors, violations=violations)

    def complaints(self, verdicts: Sequence[Verdict]) -> Iterator[str]:
        """What is wrong beside violations, a sentence each."""
        for verdict in verdicts:
            wanted = self.require.get(verdict.code, 0)
            if verdict.examined < wanted:
                needs = f" (needs {verdict.needed})" if verdict.needed else ""
                facts = "1 fact" if wanted == 1 else f"{wanted:,} facts"
                yield f"{verdict.code} is required to examine {facts} and examined {verdict.examined:,}{needs}"
        warnings = sum(verdict.warnings for verdict in verdicts)
        if self.max_warnings is not None and warnings > self.max_warnings:
            plural = "" if warnings == 1 else "s"
            yield f"{warnings:,} warning{plural}, at most {self.max_warnings:,} let through"

    def exit_code(self, verdicts: Sequence[Verdict], complete: bool = True) -> ExitCode:
        """The exit code of a report.

        Args:
            verdicts: of all checks run.
            complete: the trace is; where it is not, a pass in spite of accepted violations is none.
        """
        if self.exit_zero:
            return ExitCode.PASS
        if any(verdict.kind is Kind.FAIL and verdict.new for verdict in verdicts):
            return ExitCode.VIOLATIONS
        if any(True for _ in self.complaints(verdicts)):
            return ExitCode.VIOLATIONS
        unseen = not complete or any(verdict.kind is Kind.INCOMPLETE for verdict in verdicts)
        return ExitCode.INCOMPLETE if unseen and not self.allow_incomplete else ExitCode.PASS


def worst(codes: Sequence[ExitCode]) -> ExitCode:
    """One exit code for several traces: 2 beats 1 beats 3 beats 0."""
    return next((code for code in _WORST_FIRST if code in codes), ExitCode.PASS)
