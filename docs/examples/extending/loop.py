from lineage.trainer.agent_loop import AgentLoopBase


class Framed(AgentLoopBase):
    def __init__(self, context, session, *, before="Be short."):
        super().__init__(context, session)
        self.before = before

    async def run(self, sampling_params, **row):
        messages = [{"role": "system", "content": self.before}, *row["raw_prompt"]]
        return await self.answer_once(messages, sampling_params, row.get("multi_modal_data"), num_turns=3)
