"""Metrics under verl's names."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lineage.trainer.metrics import (
    DataRows,
    StepTimer,
    aggregate_metrics,
    compute_data_metrics,
    compute_rollout_metrics,
    compute_throughput_metrics,
    mean_metrics,
)


def rows(**changes):
    """Two trajectories of 2 and 3 response tokens, the last one with an observation token."""
    known = {
        "rm_scores": [torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.0, 3.0])],
        "token_level_rewards": [torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.0, 2.0])],
        "advantages": [torch.tensor([-1.0, -1.0]), torch.tensor([1.0, 0.0, 1.0])],
        "returns": [torch.tensor([-1.0, -1.0]), torch.tensor([1.0, 0.0, 1.0])],
        "response_mask": [torch.tensor([1, 1]), torch.tensor([1, 0, 1])],
        "prompt_lens": torch.tensor([4, 6]),
        "num_turns": torch.tensor([2, 4]),
        "clipped_at": 3,
        "prompts_clipped_at": 8,
    }
    return DataRows(**{**known, **changes})


def test_data_metrics_are_verls():
    """Scores are sums per trajectory, advantages are over masked tokens, lengths count the container."""
    metrics = compute_data_metrics(rows())
    assert metrics["critic/score/mean"] == 2.0
    assert metrics["critic/score/max"] == 3.0
    assert metrics["critic/rewards/mean"] == 1.5
    assert metrics["critic/advantages/mean"] == 0.0
    assert metrics["response_length/mean"] == 2.5
    assert metrics["response_length/clip_ratio"] == 0.5
    assert metrics["policy_length/max"] == 2.0
    assert metrics["prompt_length/min"] == 4.0
    assert metrics["num_turns/mean"] == 3.0


def test_no_real_row_has_no_data_metrics():
    """A batch of padding alone says nothing of the data."""
    assert compute_data_metrics(rows(prompt_lens=torch.zeros(0))) == {}


def test_rollout_difference_is_of_probabilities_under_the_mask():
    """The difference is of probabilities, and what lies outside the mask does not enter."""
    old, rollout = torch.tensor([0.5, 0.2]).log(), torch.tensor([0.4, 0.9]).log()
    metrics = compute_rollout_metrics(old, rollout, torch.tensor([1, 0]))
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(0.1)
    assert compute_rollout_metrics(old, rollout, torch.zeros(2)) == {}


def test_throughput_is_tokens_by_rank_and_second():
    """Tokens over seconds times ranks."""
    assert compute_throughput_metrics(600, 2.0, 3)["perf/throughput"] == 100.0


def test_mean_over_optimiser_steps():
    """A metric that only some steps have is averaged over those."""
    assert mean_metrics([{"a": 1.0}, {"a": 3.0, "b": 5.0}]) == {"a": 2.0, "b": 5.0}


def test_metrics_of_several_batches_are_one_by_their_names():
    """Means weigh by samples, counts add up, extremes stay extremes, and what holds for the step is the last."""
    one = {"actor/pg_loss": 1.0, "global_seqlen/max": 9.0, "global_seqlen/min": 2.0, "actor/skipped_steps": 1.0}
    two = {"actor/pg_loss": 4.0, "global_seqlen/max": 7.0, "global_seqlen/min": 1.0, "actor/skipped_steps": 2.0}
    one["training/filter_groups/evicted_samples"] = 3.0
    two["actor/lr"], one["actor/lr"] = 0.1, 0.2
    assert aggregate_metrics([one, two], [2, 1]) == {
        "actor/pg_loss": 2.0,
        "global_seqlen/max": 9.0,
        "global_seqlen/min": 1.0,
        "actor/skipped_steps": 3.0,
        "training/filter_groups/evicted_samples": 3.0,
        "actor/lr": 0.1,
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rollout_corr/rollout_rs_seq_max_k2_mean", 2.0),
        ("rollout_corr/rollout_rs_seq_max_k2_max", 3.0),
        ("rollout_corr/rollout_rs_seq_max_k2_min", 1.0),
        ("rollout_corr/rollout_rs_seq_max_k2_masked_fraction", 2.0),
        ("rollout_corr/rollout_is_seq_max_deviation", 3.0),
        ("rollout_corr/log_ppl_diff_min", 1.0),
    ],
)
def test_the_end_of_a_name_says_how_batches_become_one(name, expected):
    """A max in the middle is the name of a rule, not of a greatest value."""
    assert aggregate_metrics([{name: 3.0}, {name: 1.0}], [2, 2]) == {name: expected}


def test_metrics_of_batches_without_a_real_row_are_a_plain_mean():
    """No sample has a weight: the mean is that of the batches, not a division by zero."""
    assert aggregate_metrics([{"actor/pg_loss": 1.0}, {"actor/pg_loss": 2.0}], [0, 0]) == {"actor/pg_loss": 1.5}


@given(st.lists(st.tuples(st.floats(-9, 9), st.integers(1, 50)), min_size=1, max_size=4))
def test_one_batch_and_equal_batches_keep_their_metrics(parts):
    """The metrics of one batch are what they were, and a mean lies between those of its batches."""
    values, samples = [value for value, _ in parts], [count for _, count in parts]
    assert aggregate_metrics([{"actor/kl_loss": values[0]}], samples[:1]) == {"actor/kl_loss": values[0]}
    mean = aggregate_metrics([{"actor/kl_loss": value} for value in values], samples)["actor/kl_loss"]
    assert min(values) - 1e-9 <= mean <= max(values) + 1e-9


def test_timer_adds_up_by_name():
    """A stage entered twice has one time, under verl's prefix."""
    timer = StepTimer()
    for _ in range(2):
        with timer("gen"):
            pass
    assert list(timer.metrics()) == ["timing_s/gen"]
    assert timer.metrics()["timing_s/gen"] >= 0.0
