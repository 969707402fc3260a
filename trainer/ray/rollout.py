"""A rollout engine in a process of its own, and the engine as the agent loops of other processes see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lineage import hooks
from lineage.hooks import Scope, traced
from lineage.trainer.ray.errors import await_result
from lineage.trainer.ray.recording import RunProcess, RunTrace
from lineage.trainer.rollout.base import SamplingParams, TokenOutput
from lineage.trainer.setup import load_module, make_rollout, source_and_tokenizer
from lineage.trainer.weight_sync import RECEIVER, SLEEP, UPDATE, receive, sleep


class RolloutReplica(RunProcess):
    """Serves requests with weights of its own (verl's LLM server replica).

    Args:
        trace: how the process records.
        number: of the replica.
        config: the configuration.
    """

    def __init__(self, trace: RunTrace, number: int, config: Any) -> None:
        super().__init__(trace, f"rollout:{number}")
        source, tokenizer = source_and_tokenizer(config)
        self.engine = make_rollout(config, load_module(config, source), tokenizer)
        self.record_weights = config.trace.weights

    async def generate(
        self,
        scope: Scope | None,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams,
        max_tokens: int,
        seed: int,
    ) -> TokenOutput:
        """Continue a prompt, in the stage of the session that asks."""
        with hooks.inside(scope):
            return await self.engine.generate(
                request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, max_tokens=max_tokens, seed=seed
            )

    async def sleep(self, scope: Scope | None) -> None:
        """Take no more requests until the next weights."""
        with hooks.inside(scope), traced("weight_sync", component=SLEEP, consumer=RECEIVER):
            sleep(self.engine)

    async def update_weights(self, scope: Scope | None, sent: dict[str, Tensor], global_steps: int) -> None:
        """Take the actor's tensors as version ``global_steps``, and requests again."""
        recording = hooks.recorder().enabled and self.record_weights
        with hooks.inside(scope), traced("weight_sync", component=UPDATE, consumer=RECEIVER):
            receive(self.engine, sent, global_steps, recording=recording)


class RemoteRollout:
    """The replica, as the agent loops ask it (verl ``LLMServerClient``).

    Args:
        replica: handle of the :class:`RolloutReplica`.
    """

    def __init__(self, replica: Any) -> None:
        self.replica = replica

    async def generate(
        self, request_id: str, *, prompt_ids: Sequence[int], sampling_params: SamplingParams, max_tokens: int, seed: int
    ) -> TokenOutput:
        """Continue a prompt; ``seed`` alone decides the numbers drawn."""
        asked = self.replica.generate.remote(
            hooks.scope(), request_id, list(prompt_ids), sampling_params, max_tokens, seed
        )
        output: TokenOutput = await await_result(asked, "rollout:0", "generate_sequences")
        return output
