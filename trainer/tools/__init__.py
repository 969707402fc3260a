"""Tools a policy may call, and interactions that answer it as a user would (verl's shapes).

Enters: calls parsed from the policy's text, arguments of the dataset row. Leaves: text for the policy to read, rewards.
Imported by the tool agent loop and, for ``tools.config``, the trainer's set-up; a tool of your own subclasses BaseTool.
"""

from lineage.trainer.tools.base import BaseTool, ToolError, ToolResponse, function_schema
from lineage.trainer.tools.calculator import Calculator
from lineage.trainer.tools.interaction import BaseInteraction
from lineage.trainer.tools.lookup import Lookup
from lineage.trainer.tools.parser import FunctionCall, ToolParser, tool_parser

__all__ = [
    "BaseInteraction",
    "BaseTool",
    "Calculator",
    "FunctionCall",
    "Lookup",
    "ToolError",
    "ToolParser",
    "ToolResponse",
    "function_schema",
    "tool_parser",
]
