"""Drawing tokens: a batched decode loop whose every row has its own stream of random numbers.

One uniform number a token, turned into a token by inverting the cumulative distribution: what a row draws depends on
its own logits and its own seed, never on which rows share the batch. ``transformers.generate`` draws one multinomial
for the whole batch, so it cannot promise that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from lineage.trainer.rollout.base import SamplingParams

_BELOW_ONE = 1.0 - 2.0**-32  # a draw of exactly the total would fall behind the last probable token


@dataclass(frozen=True)
class Drawn:
    """Continuation of each prompt, in order.

    Attributes:
        token_ids: generated ids of each row, end-of-sequence included.
        log_probs: the log-probability of each.
        finished: true where an end-of-sequence token ended the row, false where its limit did.
        likelier: how many tokens had a greater probability than each; None unless it was asked for.
        likelier_mass: the probability of those together; None unless it was asked for.
    """

    token_ids: list[list[int]]
    log_probs: list[list[float]]
    finished: list[bool]
    likelier: list[list[int]] | None = None
    likelier_mass: list[list[float]] | None = None


def uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """The numbers each row will draw: ``(len(seeds), count)`` float64 in [0, 1)."""
    drawn = torch.empty(len(seeds), count, dtype=torch.float64)
    generator = torch.Generator()
    for row, seed in enumerate(seeds):
        generator.manual_seed(seed)
        torch.rand(count, generator=generator, dtype=torch.float64, out=drawn[row])
    return drawn


def draw(logits: Tensor, params: SamplingParams, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """One token a row.

    Args:
        logits: ``(rows, vocab)`` float32.
        uniform: ``(rows,)`` in [0, 1).

    Returns:
        Token ids ``(rows,)`` and their log-probabilities ``(rows,)`` before truncation.
    """
    scaled = logits / params.temperature if params.temperature > 0 else logits
    if params.greedy:
        tokens = scaled.argmax(dim=-1)
    else:
        cumulative = truncate(scaled, params).double().softmax(dim=-1).cumsum(dim=-1)
        target = uniform.clamp(max=_BELOW_ONE).unsqueeze(-1) * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    scored = logits if params.logprobs_mode == "raw_logprobs" else scaled
    return tokens, scored.log_softmax(dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def truncate(logits: Tensor, params: SamplingParams) -> Tensor:
    """Logits with everything outside top_k, then outside the top_p nucleus, at minus infinity; shape kept."""
    vocab = logits.shape[-1]
    if 0 < params.top_k < vocab:
        least = logits.topk(params.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if params.top_p < 1.0:
        ordered, index = logits.sort(dim=-1, descending=True, stable=True)
        probs = ordered.softmax(dim=-1)
        # a token stays when the ones before it have not yet filled the nucleus, so the first always stays
        outside = probs.cumsum(dim=-1) - probs >= params.top_p
        logits = logits.masked_fill(torch.zeros_like(outside).scatter(-1, index, outside), float("-inf"))
    return logits


def likelier(logits: Tensor, tokens: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """How far down its distribution each token stands: the evidence that top_k, top_p or greed had their say.

    Args:
        logits: ``(rows, vocab)`` float32, as :func:`draw` had them.
        tokens: ``(rows,)``, what it drew.

    Returns:
        ``(rows,)`` each: how many tokens are likelier, and the probability of those together, before truncation. A
        token kept by top_k has less than top_k of them, one of the nucleus has less than top_p, a greedy one has none:
        of that 1 says that there are some.
    """
    scaled = logits if params.temperature in (0, 1) else logits / params.temperature
    chosen = scaled.gather(-1, tokens.unsqueeze(-1))
    none = scaled.new_zeros(len(tokens))
    if params.greedy:  # one pass over the vocabulary instead of three: there is one, or there is none
        return (scaled.amax(dim=-1, keepdim=True) > chosen).squeeze(-1).int(), none
    above = scaled > chosen
    mass = scaled.softmax(dim=-1).masked_fill(~above, 0.0).sum(dim=-1) if params.top_p < 1.0 else none
    return above.view(torch.uint8).sum(dim=-1, dtype=torch.int32), mass


@torch.no_grad()
def decode(
    module: nn.Module,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    seeds: Sequence[int],
    params: SamplingParams,
    *,
    eos_token_ids: Sequence[int],
    pad_token_id: int,
    watched: bool = False,
) -> Drawn:
    """Continue left-padded prompts until each row ends or reaches its limit.

    Args:
        prompts: token ids of each row, at least one.
        limits: most tokens of each row, at least one.
        seeds: seed of each row's draws.
        watched: count what was likelier than each token that is drawn.
    """
    device = next(module.parameters()).device
    rows, longest = len(prompts), max(limits)
    prompt_width = max(len(prompt) for prompt in prompts)
    padded = [[pad_token_id] * (prompt_width - len(prompt)) + list(prompt) for prompt in prompts]
    step_ids = torch.tensor(padded, device=device)
    mask = torch.ones(rows, prompt_width + longest, dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        mask[row, : prompt_width - len(prompt)] = 0
    positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
    eos = torch.tensor([] if params.ignore_eos else list(eos_token_ids), dtype=torch.long, device=device)
    limit = torch.tensor(list(limits), device=device)
    numbers = uniforms(seeds, longest).to(device)
    cache = DynamicCache(config=module.config)
    alive = torch.ones(rows, dtype=torch.bool, device=device)
    ended = torch.zeros_like(alive)
    lengths = torch.zeros(rows, dtype=torch.long, device=device)
    ids, scores, above, start = [], [], [], 0
    with _threads_of_prompt_only(device) as prompt_done:
        for step in range(longest):
            stop = prompt_width + step
            logits = module(
                input_ids=step_ids,
                attention_mask=mask[:, :stop],
                position_ids=positions[:, start:stop],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            logits = logits.float()
            prompt_done()
            tokens, log_probs = draw(logits, params, numbers[:, step])
            ids.append(tokens)
            scores.append(log_probs)
            above += [likelier(logits, tokens, params)] if watched else []
            lengths += alive
            ended |= alive & torch.isin(tokens, eos)
            alive &= ~ended & (lengths < limit)
            if not alive.any():
                break
            step_ids, start = tokens.unsqueeze(-1), stop
    drawn = _rows(torch.stack(ids, dim=1), torch.stack(scores, dim=1), lengths, ended)
    if not above:
        return drawn
    numbers, masses = (torch.stack(column, dim=1) for column in zip(*above, strict=True))
    return replace(drawn, likelier=_cut(numbers, lengths), likelier_mass=_cut(masses, lengths))


@contextmanager
def _threads_of_prompt_only(device: torch.device) -> Iterator[Callable[[], None]]:
    """Give the prompt every thread of the CPU and the tokens after it one.

    Operators on one token a row are too small to share: on a busy machine of 2 cores a token of SmolLM2-135M took
    1190 ms with two threads and 158 ms with one.
    """
    threads = torch.get_num_threads()
    try:
        yield (lambda: torch.set_num_threads(1)) if device.type == "cpu" and threads > 1 else (lambda: None)
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def _rows(ids: Tensor, scores: Tensor, lengths: Tensor, ended: Tensor) -> Drawn:
    return Drawn(_cut(ids, lengths), _cut(scores, lengths), ended.tolist())


def _cut(drawn: Tensor, lengths: Tensor) -> list[list[Any]]:
    """Rows without what those that had already ended went on drawing."""
    return [row[:count] for row, count in zip(drawn.tolist(), lengths.tolist(), strict=True)]
