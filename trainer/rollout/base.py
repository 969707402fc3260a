"""What every rollout engine offers (verl ``LLMServerClient`` and its replicas)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from lineage.hooks import LineageError, Sampling


class RolloutError(LineageError):
    """The engine was used out of order: a request while it sleeps, or weights that do not fit."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn.

    Attributes:
        temperature: divides the logits before everything else; 0 is greedy.
        top_p: nucleus that is kept; 1 keeps all.
        top_k: most probable tokens kept; -1 keeps all.
        do_sample: false takes the most probable token.
        ignore_eos: go on past the end-of-sequence token.
        logprobs_mode: ``processed_logprobs`` (after temperature) or ``raw_logprobs`` (before). Both are over the whole
            vocabulary: truncation by top_p and top_k chooses the token, it does not change its log-prob.
        seed: seed of the run; recorded, the tokens are drawn with the request's own.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    do_sample: bool = True
    ignore_eos: bool = False
    logprobs_mode: str = "processed_logprobs"
    seed: int | None = None

    @property
    def greedy(self) -> bool:
        """True when no number is drawn."""
        return not self.do_sample or self.temperature == 0

    @property
    def narrowed(self) -> bool:
        """True when some tokens cannot be drawn."""
        return self.greedy or self.top_k > 0 or self.top_p < 1.0

    @property
    def recorded(self) -> Sampling:
        """As a trace row has it."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            do_sample=not self.greedy,
            seed=self.seed,
            logprobs_mode=self.logprobs_mode,
        )


@dataclass(frozen=True)
class TokenOutput:
    """One finished request (verl ``TokenOutput``).

    Attributes:
        token_ids: generated ids, the end-of-sequence token included.
        log_probs: log-probability of each of them.
        stop_reason: ``stop`` or ``length``.
        generated: tokens the engine counts as generated.
        extra_fields: ``global_steps``: version of the weights that generated them.
    """

    token_ids: list[int]
    log_probs: list[float]
    stop_reason: str
    generated: int
    extra_fields: dict[str, Any] = field(default_factory=dict)


class RolloutEngine(Protocol):
    """The engine as agent loops and the weight sync see it."""

    version: int | None
    cache_epoch: int
    asleep: bool

    async def generate(
        self, request_id: str, *, prompt_ids: Sequence[int], sampling_params: SamplingParams, max_tokens: int, seed: int
    ) -> TokenOutput:
        """Continue a prompt; ``seed`` alone decides the numbers drawn."""
        ...

    def sleep(self) -> None:
        """Take no more requests and drop what serves only generation (the KV cache)."""
        ...

    def wake_up(self) -> None:
        """Take requests again."""
        ...

    def reset_cache(self) -> None:
        """Forget every cached prefix: it was computed with other weights."""
        ...

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy the actor's tensors into the engine's own module."""
        ...

    def resident(self) -> dict[str, Tensor]:
        """The engine's own tensors by name, after the last update."""
        ...

    def score(self, token_ids: Sequence[int]) -> Tensor:
        """Log-probs ``(len(token_ids) - 1,)`` of each token after the first, at temperature 1; asleep or not."""
        ...

    def close(self) -> None:
        """End the engine; nothing is asked of it after."""
        ...


def admit(engine: RolloutEngine, request_id: str, prompt_ids: Sequence[int], max_tokens: int) -> None:
    """Refuse what no engine serves.

    Raises:
        RolloutError: the engine sleeps, has no weights yet, or the request is empty.
    """
    if engine.asleep:
        raise RolloutError(f"request {request_id}: the rollout sleeps; it serves after the next weight sync")
    if engine.version is None:
        raise RolloutError(f"request {request_id}: the rollout has no weights yet; sync them first")
    if not prompt_ids or max_tokens < 1:
        raise RolloutError(
            f"request {request_id}: {len(prompt_ids)} prompt tokens and room for {max_tokens}: nothing to generate"
        )
