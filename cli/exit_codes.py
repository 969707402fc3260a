"""What each exit code means, said once: in the help of every command and on the pages of docs/."""

from __future__ import annotations

from collections.abc import Mapping

from lineage.checks.verdict import ExitCode

#: of a command that judges traces; 2 beats 1 beats 3 beats 0 over several
JUDGES: Mapping[ExitCode, str] = {
    ExitCode.PASS: "pass",
    ExitCode.VIOLATIONS: "violations",
    ExitCode.UNUSABLE: "unusable input or usage, in one line",
    ExitCode.INCOMPLETE: "incomplete: the run was killed, or rows were dropped; the complete steps are judged",
    ExitCode.INTERRUPTED: "interrupted",
}
#: of ``lineage diff``
COMPARES: Mapping[ExitCode, str] = {
    ExitCode.PASS: "equal, in all that counts",
    ExitCode.VIOLATIONS: "different",
    ExitCode.UNUSABLE: JUDGES[ExitCode.UNUSABLE],
    ExitCode.INCOMPLETE: "no difference, but a trace is incomplete: what is missing could differ",
    ExitCode.INTERRUPTED: "interrupted",
}
#: of a command that answers or writes
ANSWERS: Mapping[ExitCode, str] = {
    ExitCode.PASS: "done",
    **{code: JUDGES[code] for code in (ExitCode.UNUSABLE, ExitCode.INTERRUPTED)},
}
#: of ``lineage doctor``
DIAGNOSES: Mapping[ExitCode, str] = {
    ExitCode.PASS: "the base is sound, whichever extras are missing",
    ExitCode.VIOLATIONS: "a package of the base is missing, of the wrong version, or cannot be imported",
    **{code: JUDGES[code] for code in (ExitCode.UNUSABLE, ExitCode.INTERRUPTED)},
}
#: of ``lineage selftest``
PROVES: Mapping[ExitCode, str] = {
    ExitCode.PASS: "every fault is caught, every clean run is clean, every law holds",
    ExitCode.VIOLATIONS: "a fault is missed or blamed elsewhere, a clean run is not clean, or a law is broken",
    **{code: JUDGES[code] for code in (ExitCode.UNUSABLE, ExitCode.INTERRUPTED)},
}


def epilog(meanings: Mapping[ExitCode, str]) -> str:
    """The table of exit codes under a command's help; ``\\b`` keeps its lines from being wrapped together."""
    return "\n".join(["\b", "Exit codes:", *(f"  {int(code):<3}  {said}" for code, said in meanings.items())])
