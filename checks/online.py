"""Judging a run while it trains: each step as it is sealed, by the invariants and in the words of ``lineage check``.

A :class:`StepChecker` is what ``Recorder(on_step_sealed=...)`` calls. It may be pickled until its first call: with the
recorder in a process of its own it is called there.

What it says of a step is what a check of the whole trace says of it, but for what only later rows can tell:

- a late clear or write is reported in the step that makes it, though the contract it breaks is an earlier step's;
- :data:`SETTLED_LATER` names the codes that step 0 alone cannot decide;
- keys are followed over the steps that a :class:`lineage.checks.window.Window` keeps; one that comes back after those
  is named in a warning, and only ``lineage check`` compares it with what it was;
- only rows of the process that records are seen: in a run of several processes the others' rows are judged by
  ``lineage check``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import pyarrow as pa

from lineage.checks.blame import Headline, headline
from lineage.checks.catalogue import Invariant, catalogue
from lineage.checks.engine import judge
from lineage.checks.formats.text import headline_lines
from lineage.checks.report import Report
from lineage.checks.verdict import Kind, Verdict, Violation
from lineage.checks.window import KEEP_BYTES, Window
from lineage.errors import CheckError, ViolationError
from lineage.traces.memory import MemoryTrace

log = logging.getLogger("lineage")

# code -> why step 0 is judged for it together with the first step, not when it is sealed
SETTLED_LATER = {"TOP003": "the rollout's topology may be a row of the first step"}

Place = tuple[str, str, str, str]  # code, stage, op, field


class StepChecker:
    """Judges each step of one process's run as it is sealed.

    ``raise``: a step that breaks a contract raises :class:`ViolationError`, and one that cannot be judged, because a
    check itself fails, :class:`CheckError`. ``warn``: both are logged, each place in the step (code, stage, op, field)
    and each failure once, and training goes on. A step with lost rows is not judged, as ``lineage check`` does not
    judge it: that is logged, once.

    Args:
        on_violation: ``raise`` or ``warn``.
        invariants: by which; the whole catalogue when None.
        run: what the run says of itself: ``run_id``, ``profile``.
        config: the resolved configuration.
        keep_bytes: bytes of earlier steps kept to follow keys over.

    Attributes:
        judged: steps judged.
        unjudged: steps that could not be judged.

    Raises:
        CheckError: ``on_violation`` is neither.
    """

    def __init__(
        self,
        on_violation: Literal["raise", "warn"],
        invariants: Sequence[Invariant] | None = None,
        *,
        run: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        keep_bytes: int = KEEP_BYTES,
    ) -> None:
        if on_violation not in ("raise", "warn"):
            raise CheckError(f"on_violation={on_violation!r}: a step checker takes 'raise' or 'warn'")
        self.on_violation = on_violation
        self.judged = self.unjudged = 0
        self._invariants = None if invariants is None else tuple(invariants)
        self._run, self._config = dict(run or {}), dict(config or {})
        self._window = Window(keep_bytes)
        self._trace: MemoryTrace | None = None
        self._said: set[Place] = set()
        self._failures: set[str] = set()

    @property
    def waits(self) -> bool:
        """Whether training waits for the verdict of each step."""
        return self.on_violation == "raise"

    def __call__(self, batch: pa.RecordBatch | None, global_steps: int) -> None:
        """Judge a step.

        Args:
            batch: its rows; None where some were lost.
            global_steps: which step.

        Raises:
            ViolationError: it breaks a contract, under ``raise``.
            CheckError: it could not be judged, under ``raise``.
        """
        if batch is None:
            self._window.lose(global_steps)
            self._unjudged(global_steps, "rows of it were lost")
            return
        try:
            self._window.add(batch, global_steps)
            found = self._judge(global_steps)
        except Exception as error:
            self._trace = None  # a connection left half-way is not asked again
            why = f"{type(error).__name__}: {error}"
            if self.waits:
                raise CheckError(
                    f"step {global_steps} could not be checked ({why}); trainer.lineage.on_violation=raise lets no "
                    "step pass unchecked: mend the check, or set warn or off"
                ) from error
            self._unjudged(global_steps, why)
            return
        self.judged += 1
        if found is None:
            return
        head, report = found
        if self.waits:
            raise ViolationError("\n".join(headline_lines(head, report.name)), global_steps)
        log.warning("lineage: %s", _in_one_line(head))

    def _judge(self, step: int) -> tuple[Headline, Report] | None:
        """The step's own headline, of what was not yet said in another step under ``warn``; None when there is none."""
        if self._trace is None:
            schema = self._window.rows(step)[0].schema
            self._trace = MemoryTrace(schema, run=self._run, config=self._config, threads=1)
        chosen = self._invariants if self._invariants is not None else catalogue()
        if step == 0:
            chosen = tuple(one for one in chosen if one.code not in SETTLED_LATER)
        self._trace.show(self._window.rows(step))
        self._say_forgotten(step)
        report = judge(self._trace, chosen, threads=1)
        verdicts = [mine for verdict in report.verdicts if (mine := self._own(verdict, step)).errors]
        if not self.waits:
            fresh = [(verdict, places) for verdict in verdicts if (places := self._places(verdict) - self._said)]
            self._said.update(place for _, places in fresh for place in places)
            verdicts = [verdict for verdict, _ in fresh]
        head = headline(verdicts, chosen)
        return None if head is None else (head, report)

    def _own(self, verdict: Verdict, step: int) -> Verdict:
        """The verdict on this step: earlier steps are there to be looked at, and had their own."""
        if verdict.kind is not Kind.FAIL:
            return verdict
        keys = self._window.keys(step)
        mine = tuple(one for one in verdict.violations if one.global_steps in (0, step) or one.key in keys)
        unlisted = verdict.errors - sum(map(_is_error, verdict.violations))
        if unlisted and not mine:  # a thousand of earlier steps are listed before this step's
            mine = verdict.violations[-1:]
        return replace(verdict, violations=mine, errors=unlisted + sum(map(_is_error, mine)))

    def _places(self, verdict: Verdict) -> set[Place]:
        """Where a code is broken in this step; in the whole window, where not all of it is listed."""
        errors = [one for one in verdict.violations if _is_error(one)]
        found = errors if len(errors) == verdict.errors else verdict.sites
        return {(verdict.code, one.stage, one.op, one.field) for one in found}

    def _say_forgotten(self, step: int) -> None:
        forgotten = self._window.forgotten(step)
        if forgotten:
            key, last = next(iter(forgotten.items()))
            more = f" and {len(forgotten) - 1} more" if len(forgotten) > 1 else ""
            log.warning(
                "lineage: step %d has a key of step %d, whose rows are no longer kept (%s%s): "
                "only lineage check compares them",
                *(step, last, key, more),
            )

    def _unjudged(self, step: int, why: str) -> None:
        self.unjudged += 1
        if why not in self._failures:
            self._failures.add(why)
            log.warning("lineage: step %d is not checked: %s; later ones of the same kind are not named", step, why)


def _is_error(violation: Violation) -> bool:
    return violation.severity == "error"


def _in_one_line(head: Headline) -> str:
    one = head.violation
    keys = f" at {head.keys[0]}{f' and {len(head.keys) - 1} more' if len(head.keys) > 1 else ''}" if head.keys else ""
    detail = f" ({one.detail})" if one.detail else ""
    also = "".join(f"; also {other.code}" for other in head.consequences)
    return (
        f"{head.invariant.code} {head.invariant.name}: broken at step {one.global_steps}, stage {one.stage}, "
        f"{one.op} {one.field}{keys}: expected {one.expected}, got {one.actual}{detail}{also}"
    )
