"""GRPO advantages: a session's score relative to the other sessions of its prompt.

Source: DeepSeekMath (arXiv:2402.03300), verl ``compute_grpo_outcome_advantage`` and
``compute_advantage_for_multi_trajectories``. The unit compared is the session: when a session returns several
outputs, its last one carries the score and every output gets the session's advantage. Padding rows join no group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lineage.hooks import TrajectoryKey, UserError, parse_key


@dataclass(frozen=True)
class Advantages:
    """Result of the estimator, padded.

    Attributes:
        advantages: ``(batch, response_len)`` float32, 0 outside the mask.
        returns: the same values; an outcome estimator without a critic has no other return.
    """

    advantages: Tensor
    returns: Tensor


def compute_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    keys: Sequence[str],
    *,
    uids: Sequence[str],
    is_padding: Sequence[bool],
    norm_by_std: bool = True,
    epsilon: float = 1e-6,
) -> Advantages:
    """GRPO advantages of a batch whose sessions may hold several outputs.

    Args:
        token_level_rewards: ``(batch, response_len)`` rewards, 0 on padding.
        response_mask: ``(batch, response_len)``, 1 on policy tokens.
        keys: trajectory key of each row; names the session and the output index.
        uids: prompt group of each row (the ``uid`` field).
        is_padding: rows that were added to make the batch divide.
        norm_by_std: divide by the group's unbiased standard deviation (``algorithm.norm_adv_by_std_in_grpo``).
        epsilon: added to that deviation.
    """
    finals = final_outputs(keys, is_padding)
    sessions = list(finals)
    rows = torch.tensor([finals[session] for session in sessions], dtype=torch.long)
    # float64: the mean of equal float32 scores may differ from them in the last bit, and epsilon would blow that up
    scores = token_level_rewards.double().sum(dim=-1)[rows.to(token_level_rewards.device)].cpu()
    relative = group_relative(scores, [uids[finals[session]] for session in sessions], norm_by_std, epsilon)
    by_session = dict(zip(sessions, relative.tolist(), strict=True))
    per_row = [0.0 if pad else by_session[_session(key)] for key, pad in zip(keys, is_padding, strict=True)]
    scalar = torch.tensor(per_row, dtype=torch.float32, device=response_mask.device)
    advantages = scalar.unsqueeze(-1) * response_mask.to(torch.float32)
    return Advantages(advantages, advantages.clone())


def final_outputs(keys: Sequence[str], is_padding: Sequence[bool]) -> dict[tuple[str, int], int]:
    """Row of the last output of each real session, by (uid of the key, session_id), in order of appearance."""
    best: dict[tuple[str, int], tuple[int, int]] = {}
    for row, (key, pad) in enumerate(zip(keys, is_padding, strict=True)):
        if pad:
            continue
        parsed = _parsed(key)
        session = (parsed.uid, parsed.session_id)
        if session not in best or parsed.index > best[session][0]:
            best[session] = (parsed.index, row)
    return {session: row for session, (_, row) in best.items()}


def group_relative(scores: Tensor, groups: Sequence[str], norm_by_std: bool = True, epsilon: float = 1e-6) -> Tensor:
    """``(score - mean) / (std + epsilon)`` inside each group, or the difference alone.

    A group of one has no baseline: its advantage is 0 (verl 0.9.1 would train on its raw reward).

    Args:
        scores: ``(sessions,)`` float64.
        groups: group name of each score.
    """
    names: dict[str, int] = {}
    index = torch.tensor([names.setdefault(group, len(names)) for group in groups], dtype=torch.long)
    size = torch.zeros(len(names), dtype=scores.dtype).index_add_(0, index, torch.ones_like(scores))
    mean = torch.zeros_like(size).index_add_(0, index, scores) / size
    centred = scores - mean[index]
    if not norm_by_std:
        return centred
    variance = torch.zeros_like(size).index_add_(0, index, centred.square()) / (size - 1).clamp(min=1)
    return centred / (variance.sqrt()[index] + epsilon)


def _session(key: str) -> tuple[str, int]:
    parsed = _parsed(key)
    return parsed.uid, parsed.session_id


def _parsed(key: str) -> TrajectoryKey:
    parsed = parse_key(key)
    if parsed is None:
        raise UserError(f"{key!r} in the batch is not a trajectory key {{uid}}_{{session_id}}_{{index}}")
    return parsed
