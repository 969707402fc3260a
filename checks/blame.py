"""From many violations to one headline: the first bad event in order, its consequences folded under it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lineage.checks.catalogue import Invariant
from lineage.checks.change import Change, change
from lineage.checks.verdict import Kind, Verdict, Violation
from lineage.traces import Trace


@dataclass(frozen=True)
class Consequence:
    """A failed invariant that follows from another one's failure, or stands beside it (``follows`` is empty)."""

    code: str
    count: int
    follows: str


@dataclass(frozen=True)
class Headline:
    """The first bad event.

    Attributes:
        invariant: the contract that broke there.
        violation: the first violation.
        keys: elements of that event that are at fault, in order, at most a thousand.
        count: violating elements of this code in the whole trace, without accepted ones.
        consequences: the other failed codes, in order of their first event.
        change: between which two events the content at fault changed; None where it did not, or nobody looked.
    """

    invariant: Invariant
    violation: Violation
    keys: tuple[str, ...]
    count: int
    consequences: tuple[Consequence, ...]
    change: Change | None = None


def headline(verdicts: Sequence[Verdict], invariants: Sequence[Invariant]) -> Headline | None:
    """The headline of a report, or None when nothing failed that is not accepted."""
    known = {one.code: one for one in invariants}
    failed = {verdict.code: verdict for verdict in verdicts if verdict.kind is Kind.FAIL and verdict.new}
    if not failed:
        return None
    follows = {code: _cause(code, failed, known) for code in failed}
    roots = [code for code, cause in follows.items() if not cause] or list(failed)
    # Of two contracts broken by one event, the one that explains more comes first.
    explained = {code: sum(cause == code for cause in follows.values()) for code in roots}
    root = min(roots, key=lambda code: (_first(failed[code]).ord, -explained[code], code))
    first = _first(failed[root])
    keys = tuple(
        dict.fromkeys(
            one.key
            for one in failed[root].violations
            if one.ord == first.ord and one.accepted == first.accepted and one.key is not None
        )
    )
    rest = sorted((code for code in failed if code != root), key=lambda code: (_first(failed[code]).ord, code))
    consequences = tuple(Consequence(code, failed[code].new, follows[code]) for code in rest)
    return Headline(known[root], first, keys, failed[root].new, consequences)


def traced(head: Headline | None, trace: Trace) -> Headline | None:
    """The headline with what the trace says of where its content changed."""
    return head and replace(head, change=change(trace, head.violation))


def _cause(code: str, failed: dict[str, Verdict], known: dict[str, Invariant], depth: int = 0) -> str:
    """The failed code that explains this one: named by ``subsumed_by``, and not later than it."""
    at = _first(failed[code]).ord
    for cause in known[code].subsumed_by:
        if cause in failed and _first(failed[cause]).ord <= at:
            further = _cause(cause, failed, known, depth + 1) if depth < len(known) else ""
            return further or cause
    return ""


def _first(verdict: Verdict) -> Violation:
    first = verdict.first
    if first is None:
        raise ValueError(f"{verdict.code} has no violation")
    return first
