"""The scorers: each takes verl's ``compute_score`` arguments and returns a number."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Mapping
from typing import Any

from lineage.hooks import MissingExtraError
from lineage.trainer.reward.errors import RewardError
from lineage.trainer.tasks import builtin, gym
from lineage.trainer.tools.parser import FunctionCall, tool_parser

MATH_SECONDS = 5

_RESPONSE = re.compile(r"<tool_response>(.*?)</tool_response>", re.DOTALL)


def exact_match(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    """1 when the answer is the ground truth, spaces at the ends aside."""
    return float(solution_str.strip() == str(ground_truth).strip())


def math_verify(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    """1 when the expression found in the answer equals the ground truth (package math-verify).

    Its time limit is a signal, which only the main thread may set: elsewhere it raises (and a caller that catches
    that scores 0, as verl's did). There the limit is off.
    """
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise MissingExtraError("the math_verify scorer", "train", "math_verify") from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns once that the limit is off
    seconds: Any = MATH_SECONDS if threading.current_thread() is threading.main_thread() else None
    gold = parse(str(ground_truth), parsing_timeout=seconds)
    if not gold:
        raise RewardError(f"math_verify cannot read the ground truth {str(ground_truth)!r} of {data_source}")
    answer = parse(solution_str, parsing_timeout=seconds)
    return float(verify(gold, answer, timeout_seconds=seconds))


def reasoning_gym(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    """The task's own score, in [0, 1] (package reasoning-gym); the row's entry is in ``extra_info.entry``."""
    entry = extra_info.get("entry")
    if not entry:
        raise RewardError(f"scorer reasoning_gym: a row of {data_source} has no extra_info.entry")
    return gym.score(data_source.partition("/")[2], solution_str, dict(entry))


def digits(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    """Score of the built-in task ``digits``, in [0, 1]."""
    return builtin.score_digits(solution_str, str(ground_truth))


def tool_use(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> float:
    """Score of the built-in tasks with a tool, in [0, 1], of the whole session's text.

    A quarter for a well-formed hermes call of the task's tool, a quarter when the tool's answer is the ground truth (so
    the arguments were right), half when the policy's last message is. It believes the text: a policy that writes a
    ``<tool_response>`` of its own is not found out.
    """
    truth, tool = str(ground_truth).strip(), str(data_source).rpartition("/")[2]
    rest, calls = tool_parser("hermes").extract_tool_calls(solution_str)
    asked = any(_is_call_of(tool, call) for call in calls)
    heard = asked and truth in (text.strip() for text in _RESPONSE.findall(solution_str))
    last = rest.rpartition("</tool_response>")[2].rpartition("assistant\n")[2]
    return 0.25 * asked + 0.25 * heard + 0.5 * (last.strip() == truth)


def _is_call_of(tool: str, call: FunctionCall) -> bool:
    return call.name == tool and isinstance(json.loads(call.arguments), dict)
