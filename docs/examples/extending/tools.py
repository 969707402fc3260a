from lineage.trainer.tools import BaseTool, ToolResponse, function_schema


class Stock(BaseTool):
    def get_openai_tool_schema(self):
        return function_schema("lookup", "How many of a thing are in stock.", key="the thing")

    async def create(self, instance_id=None, **kwargs):
        instance_id, response = await super().create(instance_id)
        vars(self).setdefault("stock", {})[instance_id] = {**self.config["always"], **kwargs["create_kwargs"]}
        return instance_id, response

    async def execute(self, instance_id, parameters, **kwargs):
        key, stock = parameters["key"], self.stock[instance_id]
        if key not in stock:
            raise ValueError(f"no {key}")  # the policy reads it
        return ToolResponse(text=str(stock[key])), 0.1, {}

    async def release(self, instance_id, **kwargs):
        del self.stock[instance_id]
