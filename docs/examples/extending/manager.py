from lineage.trainer.agent_loop import AgentLoopManager


class Dealer(AgentLoopManager):
    def generate_sequences(self, batch):
        for place, worker in enumerate(self.workers):
            share = list(range(place, len(batch), len(self.workers)))
            if share:
                self.start(worker, batch[share])
