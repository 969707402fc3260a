"""Per-token log-probabilities and entropy of given sequences.

Values cover the *full* sequence, shifted as verl keeps them: position ``i`` holds the log-probability of token ``i+1``
given tokens ``0..i``, and the last position, which predicts nothing, holds 0. The response's window of such a row is
``[prompt_len - 1 : seq_len - 1]``: ``protocol.response_window`` cuts it jagged, :func:`response_windows` padded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lineage.hooks import UserError
from lineage.trainer.engine.ulysses import SequenceParallel

# Values of one logits block held at once in float32: bounds memory with a large vocabulary (64 MiB).
LOGITS_BLOCK = 1 << 24


class PositionError(UserError):
    """An agent loop gave positions that the model cannot take."""


@dataclass(frozen=True)
class TokenScores:
    """Scores of a right-padded batch, each ``(batch, seq_len)`` float32; what lies past a row's end is not defined.

    Attributes:
        log_probs: position ``i``: log-probability of token ``i+1``; 0 at the last position.
        entropy: position ``i``: entropy of the distribution of token ``i+1``, nats; None when not asked for.
        temperature: what the logits were divided by.
        given: what the model was given, by field; positions of k axes are ``(batch, k, seq_len)``.
        slices: where sequences are shared out, of ``input_ids`` and ``position_ids`` the slice that this process's
            model was given, ``(batch, width)``.
    """

    log_probs: Tensor
    entropy: Tensor | None
    temperature: float
    given: Mapping[str, Tensor] = field(default_factory=dict)
    slices: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class RowScores:
    """Scores of a batch row by row, in the order of its rows, and how they were made.

    Attributes:
        log_probs: ``(seq_len,)`` a row; its last position, which predicts nothing, holds 0.
        entropy: the same of the entropy, nats; empty when not asked for.
        behind: how many rows stand before each in its forward pass.
        temperature: what the logits were divided by; None where no row was scored.
        training: the module was in training mode.
    """

    log_probs: list[Tensor]
    entropy: list[Tensor]
    behind: list[int]
    temperature: float | None
    training: bool


def pad_rows(rows: list[Tensor], value: float = 0) -> Tensor:
    """Stack rows of unequal length, padded on the right: ``(len(rows), longest)``; rows ``(k, j)`` of one k become
    ``(k, len(rows), longest)``.
    """
    if rows and rows[0].dim() == 2:
        return torch.stack([pad_rows(list(axis), value) for axis in zip(*rows, strict=True)])
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def score_tokens(
    module: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    *,
    temperature: float,
    with_entropy: bool,
    sequence: SequenceParallel | None = None,
) -> TokenScores:
    """One forward of ``module`` over right-padded sequences.

    Args:
        input_ids, attention_mask, position_ids: ``(batch, seq_len)`` int64; positions of k axes
            ``(k, batch, seq_len)``.
        temperature: logits are divided by it, as the sampler did.
        with_entropy: also return the entropy (costs a second pass over the logits).
        sequence: the processes that share the sequences out, all of which must ask; each has the scores of the whole.

    Raises:
        PositionError: positions of several axes for a model of one.
    """
    if position_ids.dim() == 3 and not _takes_axes(module):
        raise PositionError(
            f"position_ids of shape ({len(position_ids)}, seq): the model has one axis (its configuration "
            "has no mrope_section); let the agent loop give position_ids (seq), or none"
        )
    labels, last = input_ids[:, 1:], (0, 1)
    if sequence is None:
        logits = module(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        ).logits
        log_probs, entropy = _score_all(logits[:, :-1], labels, temperature, with_entropy)
        slices = dict[str, Tensor]()
    else:
        slices = {"input_ids": sequence.own(input_ids), "position_ids": sequence.own(position_ids)}
        logits = module(**slices, attention_mask=attention_mask, use_cache=False).logits
        # the next token of a slice's last one is in the next slice: labels are shifted first, and shared out then
        own_labels = sequence.own(nn.functional.pad(labels, last))
        own, own_entropy = _score_all(logits, own_labels, temperature, with_entropy)
        log_probs = sequence.whole(own, labels.shape[1])
        entropy = None if own_entropy is None else sequence.whole(own_entropy, labels.shape[1])
    padded = None if entropy is None else nn.functional.pad(entropy, last)
    return TokenScores(nn.functional.pad(log_probs, last), padded, temperature, slices=slices)


def _takes_axes(module: nn.Module) -> bool:
    """Whether the model's rotary embedding is divided over several axes, as those of vision models are."""
    config = module.config.get_text_config()  # type: ignore[union-attr, operator]
    return "mrope_section" in (getattr(config, "rope_parameters", None) or {})


def _score_all(logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
    """All rows at once, or one after the other where their logits are too many."""
    if logits.numel() <= LOGITS_BLOCK:
        return _score(logits, labels, temperature, with_entropy)
    pieces = [_score(*row, temperature, with_entropy) for row in zip(logits, labels, strict=True)]
    entropy = torch.stack([piece for _, piece in pieces if piece is not None]) if with_entropy else None
    return torch.stack([piece for piece, _ in pieces]), entropy


def _score(logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
    scaled = logits.float() / temperature
    all_log_probs = scaled.log_softmax(dim=-1)
    log_probs = all_log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    if not with_entropy:
        return log_probs, None
    return log_probs, -(all_log_probs.exp() * all_log_probs).sum(dim=-1)


def response_windows(values: Tensor, prompt_lens: list[int], response_lens: list[int]) -> Tensor:
    """Cut right-padded full-sequence values ``(batch, seq_len)`` to ``(batch, longest response)``, then zeros."""
    width = max(response_lens, default=0)
    device = values.device
    prompt = torch.tensor(prompt_lens, device=device).unsqueeze(-1)
    response = torch.tensor(response_lens, device=device).unsqueeze(-1)
    offset = torch.arange(width, device=device).unsqueeze(0)
    inside = offset < response
    at = (prompt - 1 + offset).clamp(max=values.shape[1] - 1)
    return torch.where(inside, values.gather(1, at), torch.zeros((), dtype=values.dtype, device=device))
