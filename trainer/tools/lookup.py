"""A table of the dataset row's own, asked by key."""

from __future__ import annotations

from typing import Any

from lineage.trainer.tools.base import BaseTool, Schema, ToolResponse, function_schema


class Lookup(BaseTool):
    """``lookup``: the value of ``key`` in the table of ``tools_kwargs.lookup.create_kwargs.table``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tables: dict[str, dict[str, Any]] = {}

    def get_openai_tool_schema(self) -> Schema:
        """See :meth:`BaseTool.get_openai_tool_schema`."""
        return function_schema("lookup", "Looks a key up.", key="the key")

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """See :meth:`BaseTool.create`."""
        instance_id, response = await super().create(instance_id)
        table = (kwargs.get("create_kwargs") or {}).get("table") or {}
        # rows of one Parquet file share the keys of all: a key that is another row's is null here
        self._tables[instance_id] = {str(key): value for key, value in table.items() if value is not None}
        return instance_id, response

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """See :meth:`BaseTool.execute`."""
        key, table = str(parameters["key"]), self._tables[instance_id]
        return ToolResponse(str(table[key]) if key in table else f"no key {key}"), 0.0, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """See :meth:`BaseTool.release`."""
        self._tables.pop(instance_id, None)
