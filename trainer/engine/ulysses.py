"""Ulysses sequence parallelism: the ranks of a replica hold the same rows, and each computes a slice of every sequence.

Everything in a decoder layer but its attention is computed token by token. Around the attention two all-to-alls turn a
slice of the tokens with all heads into all tokens with a share of the heads, and back (DeepSpeed Ulysses,
arXiv:2309.14509; verl ``ulysses_sequence_parallel_size``). transformers' attention interface is where they go in, so
the model's own code is left alone. Each rank's loss is the whole one; its gradient is that of its own slice, and the
sum over all ranks, by which FSDP reduces, is the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lineage.hooks import UserError

ATTENTION = "lineage_ulysses"
#: axes of queries, keys and values as transformers has them; of what attention returns the two are swapped
_HEADS, _TOKENS = 1, 2


class UlyssesError(UserError):
    """A model whose sequences cannot be shared out as asked."""


@dataclass(frozen=True)
class SequenceParallel:
    """The ranks that share the sequences of one replica, as one of them sees it.

    Attributes:
        size: ranks of the replica.
        rank: this one's number among them.
        group: process group of them.
    """

    size: int
    rank: int
    group: Any

    def width(self, length: int) -> int:
        """Tokens of each rank's slice of a sequence; the last slices may reach beyond it."""
        return -(-length // self.size)

    def own(self, whole: Tensor) -> Tensor:
        """This rank's slice of the last axis, ``(..., width)``; zeros where it reaches beyond."""
        length = whole.shape[-1]
        width = self.width(length)
        filled = nn.functional.pad(whole, (0, width * self.size - length))
        return filled[..., self.rank * width : (self.rank + 1) * width]

    def whole(self, own: Tensor, length: int) -> Tensor:
        """The slices of all ranks along the last axis, ``(..., length)``; all of them must ask.

        Its gradient is that of the own slice alone: the others have theirs.
        """
        joined: Tensor = _Gathered.apply(own, self)
        return joined[..., :length]


def share_sequences(module: nn.Module, sequence: SequenceParallel) -> None:
    """Put the all-to-alls around every attention of a model, in place; copies made of it later have them too.

    From here on it takes a slice of the tokens and of their positions, and the attention mask of the whole.

    Raises:
        UlyssesError: its heads do not divide, or it does not go by transformers' attention interface.
    """
    from transformers import AttentionInterface, AttentionMaskInterface  # seconds of imports, for those who need them

    key = f"ulysses_sequence_parallel_size={sequence.size}"
    config = module.config.get_text_config()  # type: ignore[union-attr, operator]
    if config.num_attention_heads % sequence.size:
        raise UlyssesError(
            f"{key}: {config.num_attention_heads} attention heads do not divide over {sequence.size} ranks; choose a "
            "divisor of them"
        )

    def attend(*tensors: Any, **options: Any) -> tuple[Tensor, None]:
        return _attend(sequence, *tensors, **options)

    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, _mask_of_the_whole)
    if module._can_set_attn_implementation():  # type: ignore[operator]
        module.set_attn_implementation(ATTENTION)  # type: ignore[operator]
    if config._attn_implementation != ATTENTION:
        raise UlyssesError(
            f"{key}: the attention of {type(module).__name__} does not go by transformers' attention interface; set 1"
        )


def _mask_of_the_whole(*, q_length: int, kv_length: int, q_offset: int = 0, **options: Any) -> Tensor | None:
    """The mask of all tokens against all: the model, which holds a slice, would ask for that of its own."""
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(q_length=kv_length, kv_length=kv_length, q_offset=0, **options)


def _attend(
    sequence: SequenceParallel,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention over all tokens by the own share of the heads.

    Args:
        module: the attention layer.
        query: ``(batch, heads, width, head_dim)`` of the own slice.
        key, value: the same of the model's KV heads, repeated where they are too few to be shared out.
        attention_mask: ``(batch, 1, seq_len, seq_len)``; None where every token sees all before it.
        options: of the attention (dropout, scaling and the like).

    Returns:
        ``(batch, width, heads, head_dim)`` of the own slice.
    """
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    heads, held = query.shape[_HEADS], key.shape[_HEADS]
    repeats = 1
    while held * repeats % sequence.size:
        repeats += 1
    key, value = repeat_kv(key, repeats), repeat_kv(value, repeats)
    query, key, value = (_AllToAll.apply(tensor, _HEADS, _TOKENS, sequence) for tensor in (query, key, value))
    tokens = query.shape[_TOKENS]
    if attention_mask is not None:  # what fills the slices up is no part of the sequence
        query, key, value = (tensor[:, :, : attention_mask.shape[-1]] for tensor in (query, key, value))
    of_share = SimpleNamespace(
        num_key_value_groups=heads // (held * repeats), is_causal=getattr(module, "is_causal", True)
    )
    made, _ = sdpa_attention_forward(of_share, query, key, value, attention_mask, **options)
    filled = nn.functional.pad(made, (0, 0, 0, 0, 0, tokens - made.shape[1]))
    return _AllToAll.apply(filled, 1, 2, sequence), None


class _AllToAll(torch.autograd.Function):
    """One axis is dealt over the ranks, another put together from them; backward the other way round."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dealt: int, joined: int, sequence: SequenceParallel) -> Tensor:
        ctx.axes, ctx.sequence = (dealt, joined), sequence
        return _exchange(tensor, dealt, joined, sequence)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        dealt, joined = ctx.axes
        return _exchange(grad, joined, dealt, ctx.sequence), None, None, None


def _exchange(tensor: Tensor, dealt: int, joined: int, sequence: SequenceParallel) -> Tensor:
    parts = torch.stack(tensor.chunk(sequence.size, dim=dealt))
    got = torch.empty_like(parts)
    dist.all_to_all_single(got, parts, group=sequence.group)
    return torch.cat(got.unbind(), dim=joined)


class _Gathered(torch.autograd.Function):
    """The slices of all ranks along the last axis; backward the own one."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, sequence: SequenceParallel) -> Tensor:
        ctx.sequence = sequence
        parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(sequence.size)]
        dist.all_gather(parts, own.contiguous(), group=sequence.group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        sequence = ctx.sequence
        return grad.chunk(sequence.size, dim=-1)[sequence.rank], None
