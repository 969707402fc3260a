"""diff: two traces held against each other, fact by fact.

What enters: two traces, as ``lineage.traces`` opens them. What leaves: :class:`Diff`: whether they say the same, where
the content parts first, and what differs in form or in place only. cli may import it.

A fact is who it is (step, stage, op, field, entity, key ...) and what it says, in the named ways of ``aspects``. Both
are hashed once (``facts``), matched by these hashes (``match``), and only what is shown is read again (``tally``), a
slice of steps at a time (``compare``).
"""

from __future__ import annotations

from lineage.traces.diff.aspects import ASPECTS, Aspect, UnknownAspect
from lineage.traces.diff.compare import RTOL, diff
from lineage.traces.diff.result import Count, Diff, Difference, Event, MissingStage, Setting, TraceSide

__all__ = [
    "ASPECTS",
    "RTOL",
    "Aspect",
    "Count",
    "Diff",
    "Difference",
    "Event",
    "MissingStage",
    "Setting",
    "TraceSide",
    "UnknownAspect",
    "diff",
]
