"""Questions that only a tool can answer: ``calculator`` and ``lookup``, for the loop ``tool_agent``.

``calculator`` asks for a sum of two numbers from 50 to 99; a model of 85 thousand parameters cannot add, so it has to
ask. ``lookup`` asks for a value of a table that only the tool is given, in ``extra_info.tools_kwargs``. All questions
have one width, and so have the answers: see ``warm_start``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_TABLE_ROWS = 4
_SYLLABLES = ("klmnp", "aeiou", "klmnp", "aeiou", "klmnp")  # letters of a key, place by place


@dataclass(frozen=True)
class ToolQuestion:
    """A question and the call that answers it.

    Attributes:
        tool: name of the tool.
        parameter: name of its one parameter.
        argument: what to ask it; the question is this and ``=?``.
        answer: what the tool says then.
        create_kwargs: what the dataset row gives the tool.
    """

    tool: str
    parameter: str
    argument: str
    answer: str
    create_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The user's message."""
        return f"{self.argument}=?"

    def row_fields(self) -> dict[str, Any]:
        """``agent_name`` and ``extra_info`` of the dataset row, as verl's data sets with tools have them."""
        given = {self.tool: {"create_kwargs": dict(self.create_kwargs)}} if self.create_kwargs else {}
        extra_info = {"need_tools_kwargs": bool(given), "tools_kwargs": given, "interaction_kwargs": {}}
        return {"agent_name": "tool_agent", "extra_info": extra_info}

    def demonstration(self) -> list[dict[str, Any]]:
        """The messages of a session that does it right: user, assistant with the call, tool, assistant."""
        call = {"name": self.tool, "arguments": {self.parameter: self.argument}}
        return [
            {"role": "user", "content": self.text},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "content": self.answer},
            {"role": "assistant", "content": self.answer},
        ]


def _calculator(draw: random.Random) -> ToolQuestion:
    left, right = draw.randrange(50, 100), draw.randrange(50, 100)
    return ToolQuestion("calculator", "expression", f"{left}+{right}", str(left + right))


def _lookup(draw: random.Random) -> ToolQuestion:
    table: dict[str, str] = {}
    while len(table) < _TABLE_ROWS:
        table["".join(map(draw.choice, _SYLLABLES))] = str(draw.randrange(100, 1000))
    key = draw.choice(sorted(table))
    return ToolQuestion("lookup", "key", key, table[key], {"table": table})


QUESTIONS: dict[str, Callable[[random.Random], ToolQuestion]] = {"calculator": _calculator, "lookup": _lookup}
