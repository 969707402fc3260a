"""What a fault is, and the list of them all.

A fault replaces functions of the reference trainer at seams (dotted names) in some steps of a real run, or, where no
change of the trainer could express it (another framework's layout, an asynchronous run), edits the rows of a recorded
one. It names the code that must lead the report and the stage that must be blamed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pkgutil import iter_modules, resolve_name
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from lineage import hooks
from lineage.hooks import UserError

if TYPE_CHECKING:
    from lineage.trainer.faults.rows import TraceRows

Seams = dict[str, Callable[..., Any]]
MakeSeams = Callable[[], Seams]
EditRows = Callable[["TraceRows"], None]


INCOMPLETE = "incomplete"
"""In the place of a code: no contract is broken, but the trace is not whole, and says what it lacks."""


class FaultError(UserError):
    """A fault nobody knows, or one that cannot be injected."""


@dataclass(frozen=True)
class Fault:
    """One fault, and what a check must say of it.

    Attributes:
        name: the function that makes it.
        code: the invariant that must lead the report, or :data:`INCOMPLETE`.
        stage: the stage to be blamed.
        says: what went wrong, in a sentence.
        reports: ids of the public reports it stands for (``reports/*.toml``).
        step: the first step in which it acts.
        shows: the step to be blamed, where what it leaves is used in a later one; None for that in which it acts.
        onwards: it acts in every later step as well.
        overrides: configuration the fault needs, beyond the lab's.
        also: codes that show it as well, and have no fault of their own because another code always leads.
        profile: whose conventions the trace says it follows; empty for the reference trainer's.
        seams: makes the replacements; called once a run, so they may share state. None for one that edits rows.
        edit: edits the rows of a recorded run. None for one that replaces functions.
    """

    name: str
    code: str
    stage: str
    says: str
    reports: tuple[str, ...]
    step: int
    onwards: bool
    overrides: tuple[str, ...]
    also: tuple[str, ...] = ()
    profile: str = ""
    shows: int | None = None
    seams: MakeSeams | None = None
    edit: EditRows | None = None

    @property
    def kind(self) -> str:
        """``trainer`` for one that replaces functions, ``trace`` for one that edits the rows of a recorded run."""
        return "trainer" if self.seams else "trace"

    @property
    def mode(self) -> str:
        """``ray`` for one that exists between processes, else ``embedded``."""
        return "ray" if "mode=ray" in self.overrides else "embedded"

    @contextmanager
    def inject(self) -> Iterator[None]:
        """Replace the seams for a ``with`` block; a fault that edits rows replaces none."""
        with ExitStack() as stack:
            for seam, replacement in (self.seams() if self.seams else {}).items():
                original = resolve_name(seam)
                if isinstance(original, property):
                    stack.enter_context(patch(seam, property(self._in_its_steps(original.fget, replacement))))
                else:
                    stack.enter_context(patch(seam, self._in_its_steps(original, replacement)))
            yield

    def _in_its_steps(self, original: Any, replacement: Callable[..., Any]) -> Callable[..., Any]:
        """``replacement`` in the steps of the fault, the original in the others."""

        @functools.wraps(original)
        def either(*args: Any, **options: Any) -> Any:
            now = hooks.recorder().global_steps
            if now < self.step or (now > self.step and not self.onwards):
                return original(*args, **options)
            return replacement(original, *args, **options)

        return either


_FAULTS: dict[str, Fault] = {}
_HELPERS = frozenset({"clean", "configurations", "lab", "laws", "registry", "remote", "reports", "rows", "seams"})


def fault(
    code: str,
    stage: str,
    *overrides: str,
    step: int = 2,
    onwards: bool = False,
    reports: Sequence[str] = (),
    also: Sequence[str] = (),
    profile: str = "",
    shows: int | None = None,
) -> Callable[[MakeSeams], MakeSeams]:
    """Register a function that returns ``{seam: replacement}`` as a fault; its docstring is the sentence.

    A replacement gets the function it replaces and that function's own arguments.
    """

    def register(seams: MakeSeams) -> MakeSeams:
        acts = {"step": step, "onwards": onwards, "overrides": overrides, "also": tuple(also), "shows": shows}
        _add(seams, code, stage, reports=reports, profile=profile, seams=seams, **acts)
        return seams

    return register


def trace_fault(
    code: str, stage: str, *overrides: str, step: int = 2, reports: Sequence[str] = ()
) -> Callable[[EditRows], EditRows]:
    """Register a function that edits the rows of a recorded run as a fault; its docstring is the sentence."""

    def register(edit: EditRows) -> EditRows:
        _add(edit, code, stage, reports=reports, step=step, onwards=False, overrides=overrides, edit=edit)
        return edit

    return register


def _add(function: Callable[..., Any], code: str, stage: str, *, reports: Sequence[str], **rest: Any) -> None:
    name, says = function.__name__, " ".join((function.__doc__ or "").split())
    if name in _FAULTS or not says:
        raise FaultError(f"fault {name}: " + ("its name is taken" if says else "it has no sentence"))
    _FAULTS[name] = Fault(name=name, code=code, stage=stage, says=says, reports=tuple(reports), **rest)


def all_faults(mode: str = "embedded") -> dict[str, Fault]:
    """Every fault of a mode by name, in the order of the catalogue's families."""
    _load()
    return {
        name: one for name, one in sorted(_FAULTS.items(), key=lambda item: (item[1].code, item[0])) if one.mode == mode
    }


def _load() -> None:
    package = import_module("lineage.trainer.faults")
    for module in iter_modules(package.__path__):
        if module.name not in _HELPERS:
            import_module(f"{package.__name__}.{module.name}")


def find_fault(name: str) -> Fault:
    """The fault of this name.

    Raises:
        FaultError: there is none; the nearest one is named.
    """
    _load()
    known, name = _FAULTS, name.replace("-", "_")
    if name in known:
        return known[name]
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "lineage faults lists them"
    raise FaultError(f"no fault {name!r}; {hint}")
