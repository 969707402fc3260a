"""Judging a run while it trains: each step as it is sealed, by the invariants and in the words of ``lineage check``.

A :class:`StepChecker` is what ``Recorder(on_step_sealed=...)`` calls. It may be pickled until its first call: with the
recorder in a process of its own it is called there.

What it says of a step is what a check of the whole trace says of it, but for what only later rows can tell:

- a late clear or write is reported in the step that makes it, though the contract it breaks is an earlier step's;
- :data:`SETTLED_LATER` names the codes that step 0 alone cannot decide;
- codes that look at the whole run (``looks: run``) are left to ``lineage check``: what no step has broken yet, and what
  a few steps seem to break, neither says anything of a run;
- keys are followed over the steps that a :class:`lineage.checks.window.Window` keeps; one that comes back after those
  is named in a warning, and only ``lineage check`` compares it with what it was;
- a field last written more than one step ago, and never for the keys that read it now, is not missed (QUE003);
- only rows of the process that records are seen: where it is not the only one of its run, the codes of
  :data:`OWN_ROWS` are judged, and a warning names the others, which ``lineage check`` judges at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from operator import attrgetter
from typing import Any, Literal, cast

import pyarrow as pa

from lineage.checks.baseline import Baseline
from lineage.checks.blame import Headline, headline, traced
from lineage.checks.catalogue import Check, Invariant, catalogue
from lineage.checks.engine import judge
from lineage.checks.formats.text import headline_lines
from lineage.checks.policy import Match
from lineage.checks.report import Report
from lineage.checks.verdict import Kind, Verdict, Violation
from lineage.checks.window import KEEP_BYTES, Window
from lineage.errors import CheckError, ViolationError
from lineage.traces.memory import MemoryTrace

log = logging.getLogger("lineage")

# code -> why step 0 is judged for it together with the first step, not when it is sealed
SETTLED_LATER = {"TOP003": "the rollout's topology may be a row of the first step"}

# Codes that one process's rows decide: each looks at a row by itself, or compares rows of one process. Every other one
# joins what several components say of a trajectory, and calls broken what another process has put right.
OWN_ROWS = frozenset({"ADV001", "BAT001", "KEY001", "LEN003", "TOP001"})

Place = tuple[str, str, str, str]  # code, stage, op, field


class StepChecker:
    """Judges each step of one process's run as it is sealed.

    ``raise``: a step that breaks a contract raises :class:`ViolationError`, and one that cannot be judged, because a
    check itself fails, :class:`CheckError`. ``warn``: both are logged, each place in the step (code, stage, op, field)
    and each failure once, and training goes on. A step with lost rows is not judged, as ``lineage check`` does not
    judge it: that is logged, once.

    Args:
        on_violation: ``raise`` or ``warn``.
        invariants: by which; the whole catalogue when None. A function of one must be found by its name in its module,
            when the recorder has a process of its own.
        baseline: known violations, which are let through. Of those it knows beyond the ones that a report lists, as of
            all with ``match = "site"``, no more than are known at their place are.
        alone: whether the rows of this process are all of the run's. None finds out from the recorder, which takes a
            ranked process, one not called ``driver``, and one that another process shares its folder with, to have
            company.
        run: what the run says of itself: ``run_id``, ``profile``.
        config: the resolved configuration.
        keep_bytes: bytes of earlier steps kept to follow keys over.

    Attributes:
        judged: steps judged.
        unjudged: steps that could not be judged.

    Raises:
        CheckError: ``on_violation`` is neither; when it is pickled: a function cannot be found by its name.
    """

    def __init__(
        self,
        on_violation: Literal["raise", "warn"],
        invariants: Sequence[Invariant] | None = None,
        *,
        baseline: Baseline | None = None,
        alone: bool | None = None,
        run: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        keep_bytes: int = KEEP_BYTES,
    ) -> None:
        if on_violation not in ("raise", "warn"):
            raise CheckError(f"on_violation={on_violation!r}: a step checker takes 'raise' or 'warn'")
        self.on_violation = on_violation
        self.judged = self.unjudged = 0
        self._invariants = None if invariants is None else tuple(invariants)
        self._baseline = None if baseline is None else _lenient(baseline)
        self._alone = alone
        self._is_alone: Callable[[], bool] | None = None
        self._run, self._config = dict(run or {}), dict(config or {})
        self._window = Window(keep_bytes)
        self._trace: MemoryTrace | None = None
        self._said: set[Place] = set()
        self._failures: set[str] = set()
        self._said_left_out = False

    @property
    def waits(self) -> bool:
        """Whether training waits for the verdict of each step."""
        return self.on_violation == "raise"

    def starts(self, is_alone: Callable[[], bool]) -> None:
        """What the recorder says first: how to ask whether this process is the only one of its run."""
        self._is_alone = is_alone
        self._chosen()

    def __getstate__(self) -> dict[str, Any]:
        invariants = self._invariants
        return self.__dict__ | {"_invariants": None if invariants is None else tuple(map(_named, invariants))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._invariants is not None:
            self._invariants = tuple(map(_found, self._invariants))

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
        chosen = self._chosen()
        if step == 0:
            chosen = tuple(one for one in chosen if one.code not in SETTLED_LATER)
        self._trace.show(self._window.rows(step))
        self._say_forgotten(step)
        report = judge(self._trace, chosen, threads=1)
        known = report.verdicts if self._baseline is None else map(self._baseline.accept, report.verdicts)
        verdicts = [mine for verdict in known if (mine := self._own(verdict, step)).new]
        if not self.waits:
            fresh = [(verdict, places) for verdict in verdicts if (places := self._places(verdict) - self._said)]
            self._said.update(place for _, places in fresh for place in places)
            verdicts = [verdict for verdict, _ in fresh]
        head = traced(headline(verdicts, chosen), self._trace)
        return None if head is None else (head, report)

    def _chosen(self) -> tuple[Invariant, ...]:
        """The invariants to judge by; the first time that others are seen to record too, which those leave out."""
        known = self._invariants if self._invariants is not None else catalogue()
        chosen = tuple(one for one in known if one.looks == "step")
        if self._alone is None and self._is_alone is not None and not self._is_alone():
            self._alone = False
        if self._alone is not False:
            return chosen
        own = tuple(one for one in chosen if one.code in OWN_ROWS and not one.origin)
        left_out = [one.code for one in chosen if one not in own]
        if left_out and not self._said_left_out:
            self._said_left_out = True
            log.warning(
                "lineage: this process is not the only one of its run: %s need the rows of all and are judged at the "
                "end by lineage check, not step by step",
                ", ".join(left_out),
            )
        return own

    def _own(self, verdict: Verdict, step: int) -> Verdict:
        """The verdict on this step: earlier steps are there to be looked at, and had their own."""
        if verdict.kind is not Kind.FAIL:
            return verdict
        keys = self._window.keys(step)
        mine = tuple(one for one in verdict.violations if one.global_steps in (0, step) or one.key in keys)
        unlisted = verdict.errors - sum(map(_is_error, verdict.violations))
        if unlisted and not mine:  # a thousand of earlier steps are listed before this step's
            mine = verdict.violations[-1:]
        errors = unlisted + sum(map(_is_error, mine))
        elsewhere = sum(one.accepted for one in verdict.violations) - sum(one.accepted for one in mine)
        return replace(verdict, violations=mine, errors=errors, accepted=verdict.accepted - elsewhere)

    def _places(self, verdict: Verdict) -> set[Place]:
        """Where a code is broken in this step; in the whole window, where not all of it is listed."""
        errors = [one for one in verdict.violations if _is_error(one) and not one.accepted]
        found = errors if len(errors) == verdict.new else verdict.sites
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


@dataclass(frozen=True)
class _Named:
    """Stands for a function where it is pickled; as a decorator's its name is that of the invariant made of it."""

    module: str
    name: str

    def find(self) -> Check | None:
        found = attrgetter(self.name)(import_module(self.module))
        return found.check if isinstance(found, Invariant) else cast("Check", found)


def _named(one: Invariant) -> Invariant:
    if one.check is None:
        return one
    named = _Named(getattr(one.check, "__module__", ""), getattr(one.check, "__qualname__", ""))
    try:
        there = named.module != "__main__" and named.find() is one.check
    except (ImportError, AttributeError, ValueError):
        there = False
    if not there:
        raise CheckError(
            f"{one.code}: its function {named.module}.{named.name} is not found by that name in another process: "
            "write it at the top of a module"
        )
    return replace(one, check=cast("Check", named))


def _found(one: Invariant) -> Invariant:
    check = cast("object", one.check)
    return replace(one, check=check.find()) if isinstance(check, _Named) else one


def _lenient(baseline: Baseline) -> Baseline:
    """The baseline by places, where it does not name all it knows: a step's violations may be unnamed ones."""
    unnamed = any(known.unlisted for known in baseline.known.values())
    return replace(baseline, match=Match.SITE) if unnamed else baseline


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
