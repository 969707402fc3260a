"""What a check says: a verdict, its violations, and the exit code of a whole report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, StrEnum


class Kind(StrEnum):
    """The five verdicts. A check that could not see is not a pass."""

    PASS = "pass"
    FAIL = "fail"
    NOT_APPLICABLE = "not_applicable"
    VACUOUS = "vacuous"
    INCOMPLETE = "incomplete"


class ExitCode(IntEnum):
    """Exit codes of ``lineage check``; unusable input beats violations, violations beat incomplete."""

    PASS = 0
    VIOLATIONS = 1
    UNUSABLE = 2
    INCOMPLETE = 3
    INTERRUPTED = 130


@dataclass(frozen=True)
class Violation:
    """One broken contract: the event, the element, what was expected and what was there.

    Attributes:
        ord: position of the event in the order of the whole trace.
        key: trajectory key, uid or metric; None where the row as a whole is at fault.
        severity: ``error`` or ``warning``.
    """

    run_id: str
    global_steps: int
    seq: int
    process: str
    stage: str
    op: str
    field: str
    key: str | None
    expected: str
    actual: str
    detail: str | None
    severity: str
    ord: int


@dataclass(frozen=True)
class Verdict:
    """What one invariant says of one trace.

    Attributes:
        code: the invariant's code.
        kind: which of the five.
        examined: facts looked at.
        errors: violating elements that count.
        warnings: violating elements that do not.
        violations: the first of them in order, at most a thousand.
        needed: what was missing, for ``not_applicable``; what is torn, and was missing for it, for ``incomplete``.
        seconds: time it took.
    """

    code: str
    kind: Kind
    examined: int
    errors: int = 0
    warnings: int = 0
    violations: tuple[Violation, ...] = ()
    needed: str = ""
    seconds: float = 0.0

    @property
    def first(self) -> Violation | None:
        """The first violation in order, an error before a warning."""
        errors = [violation for violation in self.violations if violation.severity == "error"]
        return next(iter(errors or self.violations), None)


def exit_code(verdicts: Iterable[Verdict], allow_incomplete: bool = False, required: Iterable[str] = ()) -> ExitCode:
    """The exit code of a report.

    Args:
        verdicts: of all checks run.
        allow_incomplete: an incomplete trace is then as good as a pass.
        required: codes that must have been examined; to have looked at nothing is then a violation.
    """
    found = list(verdicts)
    must = set(required)
    if any(verdict.kind is Kind.FAIL for verdict in found):
        return ExitCode.VIOLATIONS
    if any(verdict.code in must and not verdict.examined for verdict in found):
        return ExitCode.VIOLATIONS
    if not allow_incomplete and any(verdict.kind is Kind.INCOMPLETE for verdict in found):
        return ExitCode.INCOMPLETE
    return ExitCode.PASS
