"""Tool calls out of what a policy wrote (verl ``ToolParser``)."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from typing import Protocol

from lineage.trainer.tools.base import ToolError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FunctionCall:
    """One call.

    Attributes:
        arguments: JSON text; it need not be an object, nor what the function takes.
    """

    name: str
    arguments: str


class ToolParser(Protocol):
    """Finds the calls in a text."""

    def extract_tool_calls(self, text: str) -> tuple[str, list[FunctionCall]]:
        """The text without its calls, and the calls in order; what is no call is left out."""
        ...


class HermesToolParser:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of them.

    A call that is not JSON, or has no name or no arguments, is dropped; the others stand.
    """

    _CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)

    def extract_tool_calls(self, text: str) -> tuple[str, list[FunctionCall]]:
        """See :meth:`ToolParser.extract_tool_calls`."""
        calls = []
        for body in self._CALL.findall(text):
            try:
                call = json.loads(body)
                name, arguments = call["name"], call["arguments"]
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                logger.debug("dropped a malformed tool call: %s: %s", type(error).__name__, error)
                continue
            if isinstance(name, str):
                calls.append(FunctionCall(name, json.dumps(arguments, ensure_ascii=False)))
        return self._CALL.sub("", text), calls


TOOL_PARSERS: dict[str, ToolParser] = {"hermes": HermesToolParser()}


def tool_parser(name: str) -> ToolParser:
    """The parser of ``multi_turn.format``.

    Raises:
        ToolError: unknown; the message lists those there are.
    """
    if name not in TOOL_PARSERS:
        known = ", ".join(TOOL_PARSERS)
        raise ToolError(f"actor_rollout_ref.rollout.multi_turn.format={name} is unknown; known: {known}")
    return TOOL_PARSERS[name]
