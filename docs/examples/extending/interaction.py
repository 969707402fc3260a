from lineage.trainer.tools import BaseInteraction


class Coach(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        right = messages[-1]["content"].strip() == kwargs["truth"]
        return right, self.config["text"], float(right), {}
