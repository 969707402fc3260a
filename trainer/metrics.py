"""Metrics of a step under verl's names; padding rows are left out of every statistic of the data.

Sources: verl ``metric_utils.compute_data_metrics``, ``compute_timing_metrics``, ``compute_throughout_metrics`` and
``rollout_corr`` for the difference between the sampler's and the trainer's probabilities.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class DataRows:
    """What the data metrics read, real rows only; lists of ``(response_len,)`` tensors unless said otherwise.

    Attributes:
        prompt_lens: tokens of each prompt, ``(rows,)`` int64.
        num_turns: messages of each session, ``(rows,)``.
        clipped_at: ``data.max_response_length``; a response that long was cut there.
    """

    rm_scores: Sequence[Tensor]
    token_level_rewards: Sequence[Tensor]
    advantages: Sequence[Tensor]
    returns: Sequence[Tensor]
    response_mask: Sequence[Tensor]
    prompt_lens: Tensor
    num_turns: Tensor
    clipped_at: int
    prompts_clipped_at: int


def compute_data_metrics(rows: DataRows) -> dict[str, float]:
    """Scores, rewards, advantages, returns, lengths and turns; an empty dict when no row is real."""
    if not len(rows.prompt_lens):
        return {}
    mask = torch.cat(list(rows.response_mask)).bool()
    response_lens = torch.tensor([len(row) for row in rows.response_mask])
    policy_lens = torch.tensor([int(row.sum()) for row in rows.response_mask])
    metrics = {
        **_three("critic/score", _sums(rows.rm_scores)),
        **_three("critic/rewards", _sums(rows.token_level_rewards)),
        **_three("critic/advantages", torch.cat(list(rows.advantages))[mask]),
        **_three("critic/returns", torch.cat(list(rows.returns))[mask]),
        **_three("response_length", response_lens),
        "response_length/clip_ratio": float((response_lens >= rows.clipped_at).double().mean()),
        **_three("policy_length", policy_lens),
        **_three("prompt_length", rows.prompt_lens),
        "prompt_length/clip_ratio": float((rows.prompt_lens >= rows.prompts_clipped_at).double().mean()),
        **_three("num_turns", rows.num_turns),
    }
    return metrics


def compute_rollout_metrics(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, float]:
    """How far the sampler's probabilities are from the trainer's, on policy tokens.

    Args:
        old_log_probs, rollout_log_probs, mask: flat, of equal length.
    """
    keep = mask.bool()
    if not keep.any():
        return {}
    difference = (old_log_probs[keep].double().exp() - rollout_log_probs[keep].double().exp()).abs()
    return {
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_max": float(difference.max()),
        "training/rollout_probs_diff_mean": float(difference.mean()),
        "training/rollout_probs_diff_std": float(difference.std(correction=0)),
    }


def compute_throughput_metrics(tokens: int, seconds: float, ranks: int) -> dict[str, float]:
    """Real tokens of the step by time; padding is no work done (verl 0.9.1 counts it)."""
    return {
        "perf/total_num_tokens": float(tokens),
        "perf/time_per_step": seconds,
        "perf/throughput": tokens / (seconds * ranks) if seconds > 0 else 0.0,
    }


def balance_metrics(loads_before: Sequence[int], loads_after: Sequence[int], lens: Sequence[int]) -> dict[str, float]:
    """Tokens of each rank around balancing (verl ``log_seqlen_unbalance``), padding rows left out of ``lens``."""
    return {
        "global_seqlen/min": float(min(lens, default=0)),
        "global_seqlen/max": float(max(lens, default=0)),
        "global_seqlen/mean": sum(lens) / max(len(lens), 1),
        "global_seqlen/workload_spread": float(max(loads_before) - min(loads_before)),
        "global_seqlen/balanced_workload_spread": float(max(loads_after) - min(loads_after)),
    }


# last words of names whose values hold for the whole step, and of those that count
_LAST = ("lr", "valid", "step", "epoch")
_SUMS = ("sum", "total", "samples", "steps")


def aggregate_metrics(parts: Sequence[Mapping[str, float]], samples: Sequence[int]) -> dict[str, float]:
    """Metrics of several batches as one (verl ``MetricsAggregator``): each by the rule the end of its name asks for.

    The greatest of a ``max``, the least of a ``min``, the sum of a count, the last of what holds for the whole step,
    and the mean over samples of all else.

    Args:
        parts: metrics of each batch.
        samples: real rows of each batch, the weights of the means.
    """
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _aggregate(name, parts, samples) for name in names}


def _aggregate(name: str, parts: Sequence[Mapping[str, float]], samples: Sequence[int]) -> float:
    found = [(part[name], count) for part, count in zip(parts, samples, strict=True) if name in part]
    values = [value for value, _ in found]
    if len(values) == 1:  # a mean of one is not always that one: the weights round it
        return values[0]
    last = re.split("[/_]", name)[-1]
    if last in _LAST:
        return values[-1]
    if last == "max" or name.endswith("max_deviation"):
        return max(values)
    if last == "min":
        return min(values)
    if last in _SUMS:
        return sum(values)
    weight = sum(count for _, count in found)
    return sum(value * count for value, count in found) / weight if weight else sum(values) / len(values)


def mean_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each metric over the parts that have it (optimiser steps of one update)."""
    names = dict.fromkeys(name for part in parts for name in part)
    found = {name: [part[name] for part in parts if name in part] for name in names}
    return {name: sum(values) / len(values) for name, values in found.items()}


@dataclass
class StepTimer:
    """Seconds by stage of one step: ``timing_s/<name>``."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time of the block to ``name``."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def metrics(self) -> dict[str, float]:
        """The measured times under verl's names."""
        return {f"timing_s/{name}": seconds for name, seconds in self.seconds.items()}


def _sums(rows: Sequence[Tensor]) -> Tensor:
    return torch.stack([row.double().sum() for row in rows])


def _three(name: str, values: Tensor) -> dict[str, float]:
    if not values.numel():
        return {}
    values = values.double()
    three = {"mean": values.mean(), "max": values.max(), "min": values.min()}
    return {f"{name}/{what}": float(value) for what, value in three.items()}
