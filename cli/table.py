"""Tables: ruled and coloured in a terminal that is wide enough, plain aligned text elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_RULES = 3  # columns of a terminal that a rule and its padding take


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under their column names. NO_COLOR is honoured by rich; a pipe gets no rules and no colour."""
    cells = [[_text(value) for value in row] for row in rows]
    widths = [max([len(name), *(len(row[i]) for row in cells)]) for i, name in enumerate(columns)]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        console = Console()
        if sum(widths) + _RULES * len(widths) <= console.width:  # a narrower one would be squeezed, a letter a line
            table = Table(*columns, header_style="bold", pad_edge=False)
            for row in cells:
                table.add_row(*map(_escape, row))
            console.print(table)
            return
    for row in [list(columns), *cells]:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def _escape(text: str) -> str:
    return text.replace("[", r"\[")
