"""Micro-batches: which rows of a rank share one forward pass, by their number or by their tokens.

By tokens is verl's ``use_dynamic_bsz`` (``rearrange_micro_batches``): as many micro-batches as the budget asks for, of
nearly equal work, and as many on every rank, because a collective needs all of them. How a mini-batch is cut changes
no gradient: the denominators of the loss are those of the whole mini-batch.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lineage.trainer.batching.balance import karmarkar_karp, workload

logger = logging.getLogger(__name__)

# of one rank: the positions in its share, micro-batch by micro-batch
Positions = list[list[int]]


@dataclass(frozen=True)
class MicroBatchLimit:
    """What one forward pass of a rank may hold.

    Attributes:
        rows: most rows; None takes the whole share.
        tokens: most tokens of prompts and responses; set, it replaces ``rows``.
    """

    rows: int | None = None
    tokens: int | None = None

    @classmethod
    def of_update(cls, actor: Any) -> MicroBatchLimit:
        """The limit of the actor's update.

        Args:
            actor: ``actor_rollout_ref.actor``.
        """
        tokens = actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else None
        return cls(actor.ppo_micro_batch_size_per_gpu, tokens)

    @classmethod
    def of_log_prob(cls, role: Any, actor: Any) -> MicroBatchLimit:
        """The limit of a log-prob pass; what the role leaves null is as for the actor.

        Args:
            role: ``actor_rollout_ref.rollout`` for the old log-probs, ``actor_rollout_ref.ref`` for the reference's.
            actor: ``actor_rollout_ref.actor``.
        """
        named = role.log_prob_use_dynamic_bsz
        if not (actor.use_dynamic_bsz if named is None else named):
            return cls(role.log_prob_micro_batch_size_per_gpu)
        return cls(tokens=role.log_prob_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu)

    def split(self, seq_lens: Sequence[Sequence[int]]) -> list[Positions]:
        """Micro-batches of each rank; every row comes once, positions rise inside a micro-batch.

        Args:
            seq_lens: tokens of each row, by rank.
        """
        if self.tokens is not None:
            return pack(seq_lens, self.tokens)
        return [_cut(len(lens), self.rows or len(lens)) for lens in seq_lens]

    def attrs(self, tokens: int) -> dict[str, str]:
        """What a trace row of a micro-batch of ``tokens`` tokens says of its size; nothing where rows are counted."""
        return {} if self.tokens is None else {"tokens": str(tokens), "max_token_len": str(self.tokens)}


def pack(seq_lens: Sequence[Sequence[int]], budget: int) -> list[Positions]:
    """Rows of each rank in micro-batches of at most ``budget`` tokens and nearly equal work.

    The fewest that the tokens allow is tried first; rows do not break, so it may take more. A row that is longer than
    the budget is alone in its micro-batch (verl stops there).

    Args:
        seq_lens: tokens of each row, by rank. Ranks with equally many rows get equally many micro-batches.
    """
    alone = [[row for row, length in enumerate(lens) if length > budget] for lens in seq_lens]
    rest = [[row for row, length in enumerate(lens) if length <= budget] for lens in seq_lens]
    if any(alone):
        _say_too_long(budget)
    ranks = list(zip(seq_lens, alone, rest, strict=True))
    count = max((len(long) + -(-sum(lens[row] for row in short) // budget) for lens, long, short in ranks), default=0)
    while True:
        packed = [
            sorted([*([row] for row in long), *_partition(lens, short, count - len(long))])
            for lens, long, short in ranks
        ]
        pairs = zip(seq_lens, packed, strict=True)
        if all(len(part) == 1 or sum(lens[row] for row in part) <= budget for lens, parts in pairs for part in parts):
            return packed
        count += 1


def _partition(lens: Sequence[int], rows: Sequence[int], parts: int) -> Positions:
    """Rows in at most ``parts`` sets of nearly equal work; none is empty."""
    parts = min(parts, len(rows))
    sets = karmarkar_karp([workload(lens[row]) for row in rows], parts, equal_size=False) if parts else []
    return [[rows[place] for place in places] for places in sets if places]


def _cut(rows: int, size: int) -> Positions:
    return [list(range(start, min(start + size, rows))) for start in range(0, rows, size)] if rows else []


@functools.cache
def _say_too_long(budget: int) -> None:
    """Once a run and budget: every step meets such rows again."""
    logger.warning("a row longer than max_token_len_per_gpu=%d is alone in its micro-batch", budget)
