"""GRPO advantages: sessions of one prompt compared with one another."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lineage.trainer.advantage import compute_advantage, final_outputs, group_relative


def advantage(rewards, keys, **options):
    """Advantages of rows with one response token each, whose reward is given."""
    rewards = torch.tensor(rewards, dtype=torch.float32).unsqueeze(-1)
    options = {"uids": [key.rsplit("_", 2)[0] for key in keys], "is_padding": [False] * len(keys), **options}
    return compute_advantage(rewards, torch.ones_like(rewards), keys, **options).advantages.squeeze(-1)


@given(st.lists(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=6), min_size=1, max_size=4))
def test_complete_groups_have_mean_zero(groups):
    """Inside every group the advantages add up to nothing and stay within (n - 1) / sqrt(n)."""
    keys = [f"u{g}_{s}_0" for g, scores in enumerate(groups) for s in range(len(scores))]
    result = advantage([score for scores in groups for score in scores], keys)
    start = 0
    for scores in groups:
        part = result[start : start + len(scores)]
        start += len(scores)
        assert abs(float(part.mean())) <= 1e-3 * (1 + float(part.abs().max()))
        assert float(part.abs().max()) <= (len(scores) - 1) / math.sqrt(len(scores)) + 1e-3


def test_advantage_is_the_formula():
    """(score - mean) / (unbiased std + eps), checked against torch on one group."""
    scores = torch.tensor([0.0, 1.0, 1.0, 4.0])
    expected = (scores - scores.mean()) / (scores.std() + 1e-6)
    assert torch.allclose(advantage(scores.tolist(), ["a_0_0", "a_1_0", "a_2_0", "a_3_0"]), expected)


def test_norm_by_std_off_keeps_the_difference():
    """Without the division the advantage is the score less the group's mean (Dr. GRPO)."""
    assert advantage([1.0, 3.0], ["a_0_0", "a_1_0"], norm_by_std=False).tolist() == [-1.0, 1.0]


def test_constant_scores_give_zero():
    """Equal scores have no residue for eps to blow up, even when their float mean would differ from them."""
    assert advantage([0.1] * 7, [f"a_{s}_0" for s in range(7)]).abs().max() < 1e-6


def test_a_group_of_one_does_not_train_on_its_reward():
    """A lone survivor has no baseline, so its advantage is 0."""
    assert advantage([5.0], ["a_0_0"]).tolist() == [0.0]


def test_only_the_last_output_of_a_session_counts():
    """A session of two outputs enters the group once, by its last, and both outputs get its advantage."""
    keys = ["a_0_0", "a_0_1", "a_1_0"]
    result = advantage([99.0, 1.0, 0.0], keys)
    assert result[0] == result[1]
    assert result.tolist() == pytest.approx(advantage([1.0, 1.0, 0.0], keys).tolist())
    assert float(result[0] + result[2]) == pytest.approx(0.0, abs=1e-6)


def test_last_output_is_by_index_not_by_place():
    """Index 10 comes after index 9 wherever the rows stand."""
    assert final_outputs(["a_0_10", "a_0_9", "a_1_0"], [False] * 3) == {("a", 0): 0, ("a", 1): 2}


def test_padding_rows_join_no_group():
    """Padding changes no real row's advantage and gets 0 itself, even when it carries a real uid."""
    keys = ["a_0_0", "a_1_0", "pad_0_0"]
    plain = advantage([1.0, 2.0], keys[:2])
    padded = advantage([1.0, 2.0, 50.0], keys, uids=["a", "a", "a"], is_padding=[False, False, True])
    assert padded.tolist() == [*plain.tolist(), 0.0]


def test_advantage_is_zero_outside_the_mask():
    """Observation and padding tokens get no advantage; rewards there still count as the session's score."""
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    rewards = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    result = compute_advantage(rewards, mask, ["a_0_0", "a_1_0"], uids=["a", "a"], is_padding=[False, False])
    assert (result.advantages[mask == 0] == 0).all()
    assert (result.advantages[0][mask[0] == 1] > 0).all()
    assert torch.equal(result.advantages, result.returns)


def test_groups_do_not_mix():
    """Interleaved groups are compared each with itself."""
    scores = torch.tensor([0.0, 10.0, 2.0, 30.0], dtype=torch.float64)
    mixed = group_relative(scores, ["a", "b", "a", "b"])
    apart = group_relative(scores[[0, 2]], ["a", "a"])
    assert torch.equal(mixed[[0, 2]], apart)
