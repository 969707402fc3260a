"""Arithmetic. The expression is parsed, and only numbers and operators are evaluated: a policy writes it."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from lineage.trainer.tools.base import BaseTool, Schema, ToolResponse, function_schema

MAX_CHARACTERS = 200
MAX_BITS = 512  # of an integer on the way: beyond it a short expression could ask for minutes and gigabytes

_CHARACTERS = frozenset("0123456789.eE+-*/%() ")

Number = int | float

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class Calculator(BaseTool):
    """``calculator``: the value of ``expression``, with ``+ - * / // % **`` and parentheses."""

    def get_openai_tool_schema(self) -> Schema:
        """See :meth:`BaseTool.get_openai_tool_schema`."""
        return function_schema("calculator", "Evaluates arithmetic.", expression="for example (3+4)*2")

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """See :meth:`BaseTool.execute`."""
        return ToolResponse(spell(evaluate(str(parameters["expression"])))), 0.0, {}


def evaluate(expression: str) -> Number:
    """Value of an arithmetic expression.

    Raises:
        ValueError: it is no arithmetic, has no real value, or is too large.
    """
    text = expression.strip()
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"an expression of {len(text)} characters, at most {MAX_CHARACTERS}")
    if not _CHARACTERS.issuperset(text):
        raise ValueError("not arithmetic")
    try:
        return _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):  # the two last: nested too deeply for the parser
        raise ValueError("not arithmetic") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("too large") from None


def spell(value: Number) -> str:
    """A number as the policy reads it: 12 significant digits, a whole one without a point."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _value(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _bounded(_UNARY[type(node.op)](_value(node.operand)))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and isinstance(left, int) and isinstance(right, int):
            _check_power(left, right)
        return _bounded(_BINARY[type(node.op)](left, right))
    raise ValueError("not arithmetic")


def _check_power(base: int, exponent: int) -> None:
    """Refuse a power before it is computed."""
    if abs(base) > 1 and base.bit_length() * abs(exponent) > 2 * MAX_BITS:
        raise ValueError("too large")


def _bounded(value: Any) -> Number:
    if isinstance(value, complex):
        raise ValueError("no real value")
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise ValueError("too large")
    elif not math.isfinite(value):
        raise ValueError("too large")
    number: Number = value
    return number
