"""Where a report goes: standard output or files, in as many formats as asked for at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from lineage.checks.formats import FORMATS
from lineage.checks.formats.text import render as render_text
from lineage.checks.report import Outcome, Refused
from lineage.errors import UserError


@dataclass(frozen=True)
class Output:
    """One rendering of the report.

    Attributes:
        format: its name.
        file: where it is written; None prints it.
        quiet: of text, leave out what passed.
    """

    format: str
    file: Path | None = None
    quiet: bool = False


def outputs(formats: Sequence[str], files: Sequence[str], quiet: bool = False) -> list[Output]:
    """Pair formats and files: ``FORMAT=FILE`` says both; plain files take the formats in order.

    Raises:
        UserError: a format nobody knows, or a file whose format cannot be told.
    """
    named: list[Output] = []
    plain: list[Path] = []
    for file in files:
        form, equals, path = file.partition("=")
        if equals and form in FORMATS:
            named.append(Output(form, Path(path), quiet))
        else:
            plain.append(Path(file))
    for form in formats:
        if form not in FORMATS:
            raise UserError(f"--format {form}: no such format; known: {', '.join(FORMATS)}")
    if not plain:
        # formats that no file takes are printed; with files only, nothing is
        rest = list(formats)
        for one in named:
            if one.format in rest:
                rest.remove(one.format)
        if not named and not rest:
            rest = ["text"]
        printed = [Output(form, None, quiet) for form in rest]
    else:
        wanted = list(formats) or ["text"]
        if len(plain) != len(wanted):
            raise UserError(
                f"{len(wanted)} formats and {len(plain)} files: say which is which, as in --output sarif={plain[0]}"
            )
        printed = [Output(form, path, quiet) for form, path in zip(wanted, plain, strict=True)]
    if sum(one.file is None for one in printed) > 1:
        raise UserError(f"formats {', '.join(formats)} would be printed into each other: give all but one an --output")
    return [*named, *printed]


def write(outcomes: Sequence[Outcome], where: Sequence[Output]) -> None:
    """Render and write every output.

    Raises:
        UserError: a file cannot be written.
    """
    for one in where:
        if one.file is None:
            # in text a refusal is an error line already
            shown = [out for out in outcomes if not isinstance(out, Refused)] if one.format == "text" else outcomes
            if shown:
                typer.echo(_render(one, shown))
            continue
        try:
            one.file.parent.mkdir(parents=True, exist_ok=True)
            one.file.write_text(_render(one, outcomes) + "\n", "utf-8")
        except OSError as error:
            raise UserError(f"--output {one.file}: cannot write: {error.strerror or error}") from error


def _render(one: Output, outcomes: Sequence[Outcome]) -> str:
    return render_text(outcomes, one.quiet) if one.format == "text" else FORMATS[one.format](outcomes)
