"""Ribbons in the terminal: one character a token or more, each role its own, readable without colour."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lineage.cli.table import print_table

if TYPE_CHECKING:
    from lineage.traces.ribbon import Ribbon, Span

MARKS = {"prompt": ".", "policy": "#", "observation": "o", "inserted": "+", "unknown": "?"}
_STYLES = {"prompt": "dim", "policy": "bold green", "observation": "yellow", "inserted": "magenta", "unknown": "red"}
_LEGEND = ("", "turn", "role", "tokens", "length", "generated", "truncated_from", "trimmed")
_ALWAYS = 5  # columns shown when they say nothing too
_NARROWEST = 20
_MOST_TURNS = 24


def print_ribbons(ribbons: Sequence[Ribbon], uid: str) -> None:
    """Print ribbons: a single one with a legend of its turns, those of a group one line each, on one scale."""
    if not ribbons:
        return
    if len(ribbons) == 1:
        _print_one(ribbons[0])
    else:
        _print_group(ribbons, uid)
    if not all(ribbon.from_turns for ribbon in ribbons):
        print("no turn rows in the trace: drawn from the lengths and the mask sum, the policy's tokens first")
    print()


def _print_one(ribbon: Ribbon) -> None:
    print(_lengths(ribbon))
    _print_bar("", ribbon, max(_NARROWEST, _columns()), "")
    shown = _cut(ribbon.spans)
    rows = [_turn(span) for span in shown]
    said = [i for i in range(len(_LEGEND)) if i < _ALWAYS or any(row[i] is not None for row in rows)]
    print_table([_LEGEND[i] for i in said], [[row[i] for i in said] for row in rows])
    if len(shown) < len(ribbon.spans):
        print(f"{len(ribbon.spans) - len(shown)} turns in the middle are left out; --json has them all")


def _print_group(ribbons: Sequence[Ribbon], uid: str) -> None:
    names = [ribbon.key.removeprefix(uid) for ribbon in ribbons]
    said = [_short(ribbon) for ribbon in ribbons]
    widest = max(map(len, names))
    room = max(_NARROWEST, _columns() - widest - max(map(len, said)) - 4)
    longest = max(ribbon.tokens for ribbon in ribbons)
    scale = min(1.0, room / longest)
    for name, ribbon, lengths in zip(names, ribbons, said, strict=True):
        width = max(1, round(ribbon.tokens * scale))
        _print_bar(f"{name:<{widest}}  ", ribbon, width, " " * (min(room, longest) - width) + f"  {lengths}")
    drawn = {role for ribbon in ribbons for role, _ in _drawn(ribbon, ribbon.tokens)}
    print("  ".join(f"{mark} {role}" for role, mark in MARKS.items() if role in drawn))


def _print_bar(before: str, ribbon: Ribbon, width: int, after: str) -> None:
    drawn = _drawn(ribbon, width)
    if not sys.stdout.isatty():
        print(before + "".join(text for _, text in drawn) + after)
        return
    from rich.console import Console
    from rich.text import Text

    line = Text(before)
    for role, text in drawn:
        line.append(text, style=_STYLES.get(role, _STYLES["unknown"]))
    Console(highlight=False).print(line.append(after), soft_wrap=True)


def _drawn(ribbon: Ribbon, width: int) -> list[tuple[str, str]]:
    """(role, its characters) in order, on at most ``width`` characters."""
    from lineage.traces.ribbon import cells  # DuckDB comes with it: no command but this one waits for that

    return [(role, _mark(role) * size) for role, size in cells(ribbon, width)]


def _short(ribbon: Ribbon) -> str:
    named = {"prompt": ribbon.prompt_len, "response": ribbon.response_len, "policy": ribbon.policy_len}
    said = "  ".join(f"{name} {'-' if value is None else value:>4}" for name, value in named.items())
    return f"{said}  padding" if ribbon.is_padding else said


def _lengths(ribbon: Ribbon) -> str:
    named = {
        "prompt_len": ribbon.prompt_len,
        "response_len": ribbon.response_len,
        "seq_len": ribbon.seq_len,
        "policy_len": ribbon.policy_len,
    }
    said = [f"{name} {'-' if value is None else value}" for name, value in named.items()]
    if ribbon.min_global_steps is not None:
        said.append(f"versions {ribbon.min_global_steps}..{ribbon.max_global_steps}")
    if ribbon.is_padding:
        said.append("padding")
    return "  ".join(said)


def _turn(span: Span) -> tuple[object, ...]:
    tokens = f"{span.start}..{span.end - 1}" if span.length else None
    return (
        _mark(span.role), span.turn, span.role, tokens, span.length, span.generated, span.truncated_from, span.trimmed,
    )  # fmt: skip


def _cut(spans: Sequence[Span]) -> list[Span]:
    """All of them, or of many the first and the last half of what fits."""
    if len(spans) <= _MOST_TURNS:
        return list(spans)
    half = _MOST_TURNS // 2
    return [*spans[:half], *spans[-half:]]


def _mark(role: str) -> str:
    return MARKS.get(role, MARKS["unknown"])


def _columns() -> int:
    return shutil.get_terminal_size().columns
