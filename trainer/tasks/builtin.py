"""Tasks built in: no download, no dependency, deterministic, scored by a rule.

``digits`` asks for one digit over and over. Its score is the share of characters that are digits, half, plus the share
that are the digit asked for, half: dense enough that a random model of 85 thousand parameters moves within tens of
steps. ``add`` asks for the sum of two one-digit numbers and is scored by exact match. ``calculator`` and ``lookup``
need a tool (``tool_use``).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from lineage.trainer.tasks import tool_use

Row = dict[str, Any]

ROWS = 64


def names() -> list[str]:
    """Every task of this source."""
    return [*_TASKS, *tool_use.QUESTIONS]


def make(task: str, size: int, seed: int) -> list[Row]:
    """``size`` rows of a task."""
    draw = random.Random(f"builtin:{task}:{seed}")
    if task in tool_use.QUESTIONS:
        return [_tool_row(task, index, tool_use.QUESTIONS[task](draw)) for index in range(size)]
    return [_row(task, index, *_TASKS[task](draw)) for index in range(size)]


def score_digits(solution: str, digit: str) -> float:
    """Score of ``digits`` in [0, 1]; 0 for an empty answer."""
    if not solution:
        return 0.0
    digits = sum(character.isascii() and character.isdigit() for character in solution)
    return (digits + solution.count(digit)) / (2 * len(solution))


def _row(task: str, index: int, question: str, answer: str) -> Row:
    return {
        "data_source": f"builtin/{task}",
        "prompt": [{"role": "user", "content": question}],
        "ability": task,
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"index": index, "split": "train"},
    }


def _tool_row(task: str, index: int, question: tool_use.ToolQuestion) -> Row:
    row = _row(task, index, question.text, question.answer)
    fields = question.row_fields()
    return {**row, **fields, "extra_info": {**row["extra_info"], **fields["extra_info"]}}


def _digits(draw: random.Random) -> tuple[str, str]:
    digit = str(draw.randrange(10))
    return f"Write {digit} again and again.", digit


def _add(draw: random.Random) -> tuple[str, str]:
    left, right = draw.randrange(10), draw.randrange(10)
    return f"{left}+{right}=?", str(left + right)


_TASKS: dict[str, Callable[[random.Random], tuple[str, str]]] = {"digits": _digits, "add": _add}
