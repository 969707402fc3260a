"""Tasks of the reasoning-gym package: questions made from a seed, each with its answer and a scorer of its own."""

from __future__ import annotations

from functools import cache
from typing import Any

Row = dict[str, Any]

ROWS = 256

# Tasks whose answer is one number or expression: math-verify reads it out of a sentence, the task's own scorer
# compares the whole answer.
MATHEMATICAL = frozenset(
    {
        "basic_arithmetic",
        "bitwise_arithmetic",
        "chain_sum",
        "complex_arithmetic",
        "count_primes",
        "decimal_arithmetic",
        "decimal_chain_sum",
        "fraction_simplification",
        "gcd",
        "gsm_symbolic",
        "lcm",
        "leg_counting",
        "power_function",
        "products",
        "simple_equations",
        "simple_geometry",
    }
)


def names() -> list[str]:
    """Every task the installed package offers.

    Raises:
        ImportError: reasoning-gym is not installed.
    """
    from reasoning_gym.factory import DATASETS

    return list(DATASETS)


def make(task: str, size: int, seed: int) -> list[Row]:
    """``size`` rows of a task; the entry its scorer needs is in ``extra_info.entry``."""
    import reasoning_gym

    entries = reasoning_gym.create_dataset(task, seed=seed, size=size)
    return [_row(task, index, entries[index]) for index in range(size)]


def score(task: str, solution: str, entry: dict[str, Any]) -> float:
    """The task's own score of an answer, in [0, 1]."""
    return float(_scorer(task).score_answer(answer=solution, entry=entry))


@cache
def _scorer(task: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, seed=0, size=1)


def _row(task: str, index: int, entry: dict[str, Any]) -> Row:
    return {
        "data_source": f"reasoning_gym/{task}",
        "prompt": [{"role": "user", "content": entry["question"]}],
        "ability": task,
        "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
        "extra_info": {"index": index, "split": "train", "entry": dict(entry)},
    }
