"""What a tool is (verl ``BaseTool``): made for a call, executed, released; described by an OpenAI function schema."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lineage.hooks import UserError

Schema = dict[str, Any]


class ToolError(UserError):
    """Tools or interactions that cannot be loaded."""


@dataclass(frozen=True)
class ToolResponse:
    """What a tool says.

    Attributes:
        text: read by the policy; None is an empty message.
    """

    text: str | None = None


class BaseTool:
    """A tool. One object serves every session; what a call needs to remember is kept by instance id.

    The agent loop creates an instance for each call, executes it once and releases it (verl 0.9.1).

    Args:
        config: ``config`` of the tool's entry in ``multi_turn.tool_config_path``.
        tool_schema: OpenAI function schema; None takes the class's own.

    Raises:
        ToolError: neither has one.
    """

    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Schema | None = None) -> None:
        self.config = dict(config or {})
        schema = tool_schema or self.get_openai_tool_schema()
        name = schema.get("function", {}).get("name") if schema else None
        if not isinstance(name, str):
            raise ToolError(f"{type(self).__name__}: the tool schema has no function name; give tool_schema")
        self.tool_schema: Schema = dict(schema or {})
        self.name = name
        self._calls = itertools.count()

    def get_openai_tool_schema(self) -> Schema | None:
        """The class's own schema."""
        return None

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Begin a call.

        Args:
            kwargs: ``create_kwargs``: what the dataset row gives the tool
                (``extra_info.tools_kwargs.<tool>.create_kwargs``).

        Returns:
            The instance id, and a response that nobody reads.
        """
        return instance_id or f"{self.name}-{next(self._calls)}", ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Do what was asked.

        Args:
            parameters: arguments of the call.

        Returns:
            The response, the reward of the call (kept in ``tool_rewards``; None is none) and metrics.

        Raises:
            Exception: any; the policy reads its text.
        """
        raise NotImplementedError

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Reward of an instance as it stands; for a loop of your own, the tool agent loop does not ask."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End the call, also one that raised."""


def function_schema(name: str, description: str, **parameters: str) -> Schema:
    """OpenAI schema of a function whose parameters are required strings.

    Args:
        parameters: description of each.
    """
    properties = {parameter: {"type": "string", "description": text} for parameter, text in parameters.items()}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": properties, "required": list(parameters)},
        },
    }
