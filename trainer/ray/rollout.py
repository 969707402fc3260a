"""Rollout engines in processes of their own, and the rollout as the agent loops of other processes see it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

from lineage import hooks
from lineage.hooks import Scope, traced
from lineage.trainer.models import ModelSource, declared_eos_token_ids
from lineage.trainer.parts import prompt_length, response_length
from lineage.trainer.ray.errors import await_result
from lineage.trainer.ray.log_relay import LogLine
from lineage.trainer.ray.recording import RunProcess, RunTrace
from lineage.trainer.rollout.base import RolloutEngine, SamplingParams, TokenOutput
from lineage.trainer.rollout.vllm import VLLMRollout
from lineage.trainer.setup import load_module, make_rollout, source_and_tokenizer
from lineage.trainer.weight_sync import PROBE_TOKENS, RECEIVER, SLEEP, UPDATE, Sent, receive, sleep

#: sessions a client remembers the replica of; more than are ever in flight
SESSIONS = 10_000
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


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
        if config.actor_rollout_ref.rollout.name == "vllm":
            self.engine: RolloutEngine = make_vllm_rollout(config, source, tokenizer)
        else:
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

    async def update_weights(self, scope: Scope | None, sent: Sent, global_steps: int) -> None:
        """Take the actor's tensors as version ``global_steps``, and requests again."""
        recording = hooks.recorder().enabled and self.record_weights
        with hooks.inside(scope), traced("weight_sync", component=UPDATE, consumer=RECEIVER):
            receive(self.engine, sent, global_steps, recording=recording)

    def close(self, error: str | None = None) -> list[LogLine]:
        """The run has ended: close what this replica recorded, and its engine."""
        lines = super().close(error)
        self.engine.close()
        return lines


def make_vllm_rollout(config: Any, source: ModelSource, tokenizer: Any) -> VLLMRollout:
    """vLLM as ``rollout`` configures it, over the model's files."""
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    length = max(rollout.max_model_len or prompt_length(config) + response_length(config), PROBE_TOKENS + 1)
    return VLLMRollout(
        source.folder,
        eos_token_ids=declared_eos_token_ids(source, tokenizer),
        max_model_len=length,
        dtype=_DTYPES[config.actor_rollout_ref.actor.fsdp_config.model_dtype],
        max_num_seqs=rollout.max_num_seqs,
        logprobs_mode=rollout.logprobs_mode,
        free_cache_engine=rollout.free_cache_engine,
        enable_prefix_caching=rollout.enable_prefix_caching,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        max_num_batched_tokens=max(rollout.max_num_batched_tokens, rollout.max_num_seqs, length),
        seed=config.trainer.seed % 2**32,
        trust_remote_code=model.trust_remote_code,
        hf_overrides=OmegaConf.to_container(model.override_config),
        **({"enforce_eager": True} if rollout.enforce_eager else {}),
    )


class RemoteRollout:
    """All replicas, as the agent loops ask them (verl ``LLMServerClient``).

    A session stays with the replica of its first request, where the prefix of its next turn is cached; a new one goes
    to the replica with the fewest requests of this process in flight, the first of several.

    Args:
        replicas: handles of :class:`RolloutReplica`, by number.
    """

    def __init__(self, replicas: Sequence[Any]) -> None:
        self.replicas = list(replicas)
        self._in_flight = [0] * len(self.replicas)
        self._replica_of: OrderedDict[str, int] = OrderedDict()

    async def generate(
        self, request_id: str, *, prompt_ids: Sequence[int], sampling_params: SamplingParams, max_tokens: int, seed: int
    ) -> TokenOutput:
        """Continue a prompt; ``seed`` alone decides the numbers drawn."""
        number = self._choose(request_id)
        self._in_flight[number] += 1
        try:
            asked = self.replicas[number].generate.remote(
                hooks.scope(), request_id, list(prompt_ids), sampling_params, max_tokens, seed
            )
            output: TokenOutput = await await_result(asked, f"rollout:{number}", "generate_sequences")
        finally:
            self._in_flight[number] -= 1
        return output

    def _choose(self, session: str) -> int:
        number = self._replica_of.get(session)
        if number is None:
            number = min(range(len(self.replicas)), key=lambda each: self._in_flight[each])
        self._replica_of[session] = number
        self._replica_of.move_to_end(session)
        if len(self._replica_of) > SESSIONS:
            self._replica_of.popitem(last=False)
        return number
