"""Where a report goes: standard output or files, in as many formats as asked for at once."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from lineage.checks.formats import FORMATS, PRINTED, Appendix, load, split_output
from lineage.checks.report import Outcome, Refused
from lineage.errors import UserError

_BY_NAME = {".sarif": "sarif", ".sarif.json": "sarif", ".json": "json", ".xml": "junit"}


@dataclass(frozen=True)
class Output:
    """One rendering of the report.

    Attributes:
        format: its name.
        file: where it is written; None prints it.
        quiet: of what people read, leave out what passed.
    """

    format: str
    file: Path | None = None
    quiet: bool = False


def outputs(formats: Sequence[str], files: Sequence[str], quiet: bool = False) -> list[Output]:
    """Pair formats and files.

    ``FORMAT=FILE`` is a copy beside what is printed. A plain ``FILE`` is written instead of printing: the files take
    the formats in order; without formats each takes the one its name ends in, else text. Of the formats, or text where
    none is said, what no file takes is printed. ``-`` as a file prints.

    Raises:
        UserError: a format nobody knows, a file whose format cannot be told, or two reports in one place.
    """
    for form in formats:
        _known(form, f"--format {form}")
    pairs = [_split(said) for said in files]
    named = [(form, file) for form, file in pairs if form]
    plain = [file for form, file in pairs if not form]
    taken = {form for form, _ in named}
    rest = [form for form in dict.fromkeys(formats or ["text"]) if form not in taken]
    if plain and not formats:
        named += [(_by_name(file), file) for file in plain]
    elif plain:
        if len(plain) != len(rest):
            raise UserError(
                f"--format {','.join(formats)} and --output {plain[0]}: say which is which, "
                f"as in --output {_by_name(plain[0])}={plain[0]}"
            )
        named += [(_meant(form, file), file) for form, file in zip(rest, plain, strict=True)]
    elif formats or PRINTED not in [file for _, file in named]:
        named += [(form, PRINTED) for form in rest]
    return _apart([Output(form, None if file == PRINTED else Path(file), quiet) for form, file in named])


def write(outcomes: Sequence[Outcome], where: Sequence[Output]) -> None:
    """Render and write every output, the printed one last; one that cannot be written keeps no other from it.

    Raises:
        UserError: files cannot be written, in one line.
    """
    failed: list[str] = []
    for one in sorted(where, key=lambda one: one.file is None):
        form = load(one.format)
        if one.file is not None:
            failed += _write(one.file, form.render(outcomes, one.quiet))
        if form.appendix is not None and (path := os.environ.get(form.appendix.variable)):
            failed += _append(Path(path), form.appendix, outcomes)
        if one.file is None:
            # a refusal is an error line already
            shown = [out for out in outcomes if not isinstance(out, Refused)] if one.format == "text" else outcomes
            _print(form.render(shown, one.quiet))
    if failed:
        raise UserError(f"--output: cannot write {'; '.join(failed)}")


def _split(said: str) -> tuple[str, str]:
    """Format and file of one ``--output``; the format is empty where only a file is named."""
    form, file = split_output(said)
    if form:
        _known(form, f"--output {said}")
    if not file:
        raise UserError(f"--output {said}: name a file")
    return form, file


def _known(form: str, where: str) -> None:
    if form not in FORMATS:
        raise UserError(f"{where}: no such format; known: {', '.join(FORMATS)}")


def _by_name(file: str) -> str:
    """The format a file's name ends in; text when it says nothing."""
    return next((form for end, form in _BY_NAME.items() if file.lower().endswith(end)), "text")


def _meant(form: str, file: str) -> str:
    """The format, unless the file's name says that text was not meant for it."""
    other = _by_name(file)
    if form == "text" != other:
        raise UserError(f"--format text --output {file}: say --output {other}={file}, or text={file} if that is meant")
    return form


def _apart(every: list[Output]) -> list[Output]:
    """The outputs, when each has a place of its own."""
    by_place: dict[Path | None, Output] = {}
    for one in every:
        place = None if one.file is None else Path(os.path.abspath(one.file))
        other = by_place.setdefault(place, one)
        if other is not one:
            both = f"{other.format} and {one.format}"
            raise UserError(
                f"{both} would be printed into each other: give one a file, as in --output {one.format}=FILE"
                if place is None
                else f"--output {one.file}: {both} would be written into one file"
            )
    for one in every:
        if one.file is not None and _is_trace(one.file):
            raise UserError(f"--output {one.file}: that is a Parquet file, and a report would take its place")
    return every


def _is_trace(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            return file.is_file() and opened.read(4) == b"PAR1"
    except OSError:
        return False


def _write(file: Path, text: str) -> list[str]:
    """Write a file, whole or not at all; what kept it from being written, if anything did."""
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists() and not file.is_file():  # a device or a pipe is written as it is
            file.write_text(f"{text}\n", "utf-8", errors="backslashreplace", newline="\n")
            return []
        # a path that is no UTF-8 may be in it
        aside.write_text(f"{text}\n", "utf-8", errors="backslashreplace", newline="\n")
        os.replace(aside, file)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        return [f"{file}: {error.strerror or error}"]
    return []


def _append(file: Path, appendix: Appendix, outcomes: Sequence[Outcome]) -> list[str]:
    """Append to a file that others write to as well, within its limit; likewise."""
    try:
        with file.open("ab") as opened:
            opened.write(appendix.render(outcomes, appendix.limit - opened.tell()).encode())
    except OSError as error:
        return [f"{file}: {error.strerror or error}"]
    return []


def _print(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    if text:
        typer.echo(text.encode(encoding, "backslashreplace").decode(encoding))
