"""What a check says: a verdict, its violations, and the exit code of a whole report."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum


class Kind(StrEnum):
    """The five verdicts. A check that could not see is not a pass."""

    PASS = "pass"
    FAIL = "fail"
    NOT_APPLICABLE = "not_applicable"
    VACUOUS = "vacuous"
    INCOMPLETE = "incomplete"


#: what a verdict is called whose violations are all accepted
ACCEPTED = "accepted"


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
        accepted: known from a baseline, or under a threshold: it does not count for the exit code.
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
    accepted: bool = False


@dataclass(frozen=True)
class Site:
    """Where violations of one code happen: the place in the step, whichever its trajectories; and how many."""

    stage: str
    op: str
    field: str
    count: int


@dataclass(frozen=True)
class Verdict:
    """What one invariant says of one trace.

    Attributes:
        code: the invariant's code.
        kind: which of the five. A baseline or a threshold does not change it: it is what the trace shows.
        examined: facts looked at.
        errors: violating elements that count.
        warnings: violating elements that do not.
        accepted: of the errors, those a baseline or a threshold accepts.
        violations: the first of them in order, at most a thousand.
        sites: all errors by the place in the step they happen at.
        needed: what was missing, for ``not_applicable``; what is torn, and was missing for it, for ``incomplete``.
        seconds: time it took.
    """

    code: str
    kind: Kind
    examined: int
    errors: int = 0
    warnings: int = 0
    violations: tuple[Violation, ...] = ()
    sites: tuple[Site, ...] = ()
    needed: str = ""
    seconds: float = 0.0
    accepted: int = 0

    @property
    def new(self) -> int:
        """Errors nobody has accepted."""
        return self.errors - self.accepted

    @property
    def word(self) -> str:
        """The verdict in a word; violations that are all accepted are neither a pass nor a failure of the gate."""
        return ACCEPTED if self.errors and not self.new else self.kind.value

    @property
    def first(self) -> Violation | None:
        """The first violation in order, one that is not accepted before the others, an error before a warning."""
        order = sorted(self.violations, key=lambda one: (one.severity != "error", one.accepted))
        return next(iter(order), None)
