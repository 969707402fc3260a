"""Faults of token identity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lineage import hooks
from lineage.trainer.faults.registry import Seams, fault
from lineage.trainer.faults.seams import GENERATE, TRAINER, TRAJECTORY_FIELDS, tiny_tokenizer
from lineage.trainer.protocol import KVBatchMeta, nested_from_list
from lineage.trainer.rollout.base import SamplingParams, TokenOutput
from lineage.trainer.stages.fields import put
from lineage.trainer.training import rows_of


# without the sampler's log-probs nothing else can know the tokens
@fault("TOK001", "rollout", "actor_rollout_ref.rollout.calculate_log_probs=false")
def retokenised_input_ids() -> Seams:
    """The sequence is decoded to text, normalised and encoded again: as many tokens, and others."""

    # a subword tokenizer drifts without a normaliser; the tiny one has a token a character, so lower case does it
    def write(original: Any, *args: Any) -> TensorDict:
        fields = original(*args)
        encoded = [_encoded_again(ids.tolist()) for ids in rows_of(fields["input_ids"])]
        fields["input_ids"] = nested_from_list([torch.tensor(ids) for ids in encoded])
        return fields

    return {TRAJECTORY_FIELDS: write}


@fault("TOK002", "rollout", reports=["rllm-hybrid-assemble-retokenization"])
def sessions_kept_as_text() -> Seams:
    """Sessions are kept as text: the ids that train are made of it anew, and are not those the engine returned."""

    def kept(original: Any, outputs: Any, *args: Any) -> Any:
        return [replace(one, response_ids=_encoded_again(one.response_ids)) for one in original(outputs, *args)]

    return {"lineage.trainer.agent_loop.worker.check_outputs": kept}


@fault("TOK002", "rollout")
def responses_encoded_when_written() -> Seams:
    """Responses are encoded anew where they are written, after they were scored; the sequences are made of them."""

    def write(original: Any, *args: Any) -> TensorDict:
        fields = original(*args)
        encoded = [torch.tensor(_encoded_again(ids.tolist())) for ids in rows_of(fields["responses"])]
        fields["responses"] = nested_from_list(encoded)
        pairs = zip(rows_of(fields["prompts"]), encoded, strict=True)
        fields["input_ids"] = nested_from_list([torch.cat(pair) for pair in pairs])
        return fields

    return {TRAJECTORY_FIELDS: write}


def _encoded_again(ids: list[int]) -> list[int]:
    encoded: list[int] = tiny_tokenizer().encode(tiny_tokenizer().decode(ids).lower(), add_special_tokens=False)
    return encoded


@fault("TOK002", "rollout", reports=["trl-two-bos"])
def two_bos() -> Seams:
    """The templated text begins with its first token, and the engine's tokenizer puts it there once more."""
    return _sent(lambda ids: [ids[0], *ids])


@fault("TOK002", "rollout", reports=["trl-image-placeholder-expanded-twice"])
def placeholder_expanded_twice() -> Seams:
    """A placeholder that stands for a picture is expanded for the trainer, and again by the engine."""
    return _sent(lambda ids: [*ids[:8], *ids[4:8] * 3, *ids[8:]])


@fault("TOK002", "rollout", reports=["swift-exact-token-consistency"])
def injected_prefix_not_trained() -> Seams:
    """The engine is given the first tokens of its answer; on one path they are not a part of what is trained."""
    return _sent(lambda ids: [*ids, *tiny_tokenizer().encode("so ", add_special_tokens=False)])


def _sent(other: Callable[[list[int]], list[int]]) -> Seams:
    def generate(original: Any, loop: Any, prompt_ids: Sequence[int], *args: Any) -> Any:
        return original(loop, other(list(prompt_ids)), *args)

    return {GENERATE: generate}


@fault("TOK002", "rollout", "actor_rollout_ref.rollout.top_p=0.95")
def end_forced_on_cut_answers() -> Seams:
    """An answer that reached its limit has its last token replaced by the end token: the policy learns to stop where
    it did not."""

    async def generate(
        original: Any, loop: Any, prompt_ids: Sequence[int], params: SamplingParams, max_tokens: int | None = None
    ) -> TokenOutput:
        answer = await original(loop, prompt_ids, params, max_tokens)
        if answer.stop_reason != "length":
            return answer
        return replace(answer, token_ids=[*answer.token_ids[:-1], tiny_tokenizer().eos_token_id])

    return {GENERATE: generate}


@fault("TOK002", "rollout")
def answers_of_the_neighbour() -> Seams:
    """The engine's answers come back in the order they were finished and are given to the requests as they stand."""

    def generate(original: Any, *args: Any) -> list[TokenOutput]:
        outputs = original(*args)
        return sorted(outputs, key=lambda output: output.generated)

    return {"lineage.trainer.rollout.hf.HFRollout._generate": generate}


def _cleaned(parts: Any, batch: KVBatchMeta) -> Tensor:
    """The responses of a batch with the tokens that end or separate messages replaced by padding."""
    held = parts.queue.kv_batch_get(batch.keys, batch.partition_id, ["responses"])["responses"]
    return nested_from_list([torch.where(ids < 4, torch.zeros_like(ids), ids) for ids in rows_of(held)])


@fault("TOK004", "postprocess")
def hook_cleans_the_responses() -> Seams:
    """A hook of the user's own takes special tokens out of the responses before anybody else reads them; log-probs,
    sequences and scores stay those of the tokens that were generated."""

    async def sample(original: Any, trainer: Any) -> KVBatchMeta:
        batch = await original(trainer)
        with hooks.traced("postprocess", component="CleanResponses"):
            put(trainer.parts, batch, {"responses": _cleaned(trainer.parts, batch)})
        return batch

    return {f"{TRAINER}._sample": sample}


@fault("TOK004", "advantage")
def responses_written_back_clean() -> Seams:
    """The advantage stage replaces what follows a stop token by padding and writes the responses back with its own
    fields."""

    def write(original: Any, parts: Any, batch: KVBatchMeta, columns: dict[str, Any]) -> None:
        original(parts, batch, {**columns, "responses": _cleaned(parts, batch)})

    return {"lineage.trainer.stages.advantage.put": write}
