"""Output formats of a check: each renders the outcomes of all traces as one text.

A format is a module of this package with ``render(outcomes, quiet)``. It is imported when it is first asked for: a
report as text needs no XML.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from lineage.checks.report import Outcome

#: what stands for standard output where a file is named
PRINTED = "-"
#: what ``--format`` takes
FORMATS = ("text", "json", "junit", "sarif", "github")

Render: TypeAlias = "Callable[[Sequence[Outcome], bool], str]"


@dataclass(frozen=True)
class Appendix:
    """What a format has to say beside its text, in a file that whoever started the program names.

    Attributes:
        variable: environment variable that holds the file's path; unset or empty, there is no appendix.
        limit: bytes the file may hold in all.
        render: the outcomes as UTF-8 text of no more bytes than its second argument.
    """

    variable: str
    limit: int
    render: Callable[[Sequence[Outcome], int], str]


@dataclass(frozen=True)
class Format:
    """One way to write a report.

    Attributes:
        name: what ``--format`` calls it.
        render: the outcomes as one text; under ``quiet``, one that people read leaves out what passed.
        appendix: what it appends elsewhere, if anything.
    """

    name: str
    render: Render
    appendix: Appendix | None = None


def split_output(said: str) -> tuple[str, str]:
    """``FORMAT=FILE`` or ``FILE`` as format and file; the format is empty where only a file is named."""
    form, equals, file = said.partition("=")
    return (form, file) if equals and form.isalnum() else ("", said)


def load(name: str) -> Format:
    """The format of this name, one of ``FORMATS``."""
    if name not in FORMATS:
        raise KeyError(name)
    module = import_module(f"{__name__}.{name}")
    return Format(name, module.render, getattr(module, "APPENDIX", None))


__all__ = ["FORMATS", "PRINTED", "Appendix", "Format", "Render", "load", "split_output"]
