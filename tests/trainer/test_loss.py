"""The PPO loss: terms by token, aggregated over the global mini-batch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lineage.trainer.loss import AGGREGATIONS, LossError, MiniBatch, aggregate, compute_policy_loss, kl_penalty

CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0}


def policy_loss(ratio, advantage):
    """Loss and clip flags of one token with a ratio and an advantage."""
    result = compute_policy_loss(torch.tensor([math.log(ratio)]), torch.zeros(1), torch.tensor([advantage]), **CLIP)
    return float(result.loss), bool(result.clipped), bool(result.clipped_lower)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "lower"),
    [
        (1.0, 2.0, -2.0, False, False),
        (1.2, 1.0, -1.2, False, False),
        (1.5, 1.0, -1.3, True, False),  # gains stop at 1 + high
        (0.5, 1.0, -0.5, False, False),  # a loss of probability is not clipped for a good token
        (0.5, -1.0, 0.8, True, False),  # gains stop at 1 - low
        (2.0, -1.0, 2.0, False, False),
        (5.0, -1.0, 3.0, False, True),  # the dual clip bounds what a bad token can cost
    ],
)
def test_policy_loss_clips_on_the_right_side(ratio, advantage, loss, clipped, lower):
    """The pessimistic bound of PPO, and the dual clip for negative advantages."""
    value, was_clipped, was_lower = policy_loss(ratio, advantage)
    assert value == pytest.approx(loss, rel=1e-5)
    assert (was_clipped, was_lower) == (clipped, lower)


def test_gradient_at_ratio_one_is_the_policy_gradient():
    """Before the first update the gradient of the loss is minus the advantage."""
    log_prob = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([0.7, -1.3])
    compute_policy_loss(log_prob, log_prob.detach(), advantages, **CLIP).loss.sum().backward()
    assert torch.allclose(log_prob.grad, -advantages)


def test_dual_clip_bound_must_exceed_one():
    """A bound that would cut plain on-policy losses is refused."""
    with pytest.raises(LossError, match="clip_ratio_c"):
        compute_policy_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), **{**CLIP, "clip_ratio_c": 1.0})


@pytest.mark.parametrize("kind", ["k2", "mse", "k3", "low_var_kl", "abs"])
@given(st.floats(-8, 0), st.floats(-8, 0))
def test_kl_estimators_are_never_negative(kind, log_prob, ref):
    """All but k1 are non-negative for any pair of log-probs, and 0 where they agree."""
    one, other = torch.tensor([log_prob], dtype=torch.float64), torch.tensor([ref], dtype=torch.float64)
    assert float(kl_penalty(one, other, kind)) >= -1e-12
    assert float(kl_penalty(one, one, kind)) == 0.0


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("kl", -0.5),
        ("abs", 0.5),
        ("mse", 0.125),
        ("low_var_kl", math.exp(0.5) - 0.5 - 1),
    ],
)
def test_kl_estimators_by_hand(kind, value):
    """A policy 0.5 nats below the reference on one token; a + keeps the value."""
    log_prob, ref = torch.tensor([-1.5], dtype=torch.float64), torch.tensor([-1.0], dtype=torch.float64)
    assert float(kl_penalty(log_prob, ref, kind)) == pytest.approx(value)
    assert float(kl_penalty(log_prob, ref, f"{kind}+")) == pytest.approx(value)


@pytest.mark.parametrize("kind", ["k1+", "k3+", "abs+", "low_var_kl+", "k2"])
@given(st.floats(-8, 0), st.floats(-8, 0))
def test_a_plus_has_the_gradient_of_k2(kind, log_prob, ref):
    """Whatever the value, the slope is the difference of the log-probs."""
    policy = torch.tensor([log_prob], dtype=torch.float64, requires_grad=True)
    kl_penalty(policy, torch.tensor([ref], dtype=torch.float64), kind).sum().backward()
    assert float(policy.grad) == pytest.approx(log_prob - ref)


def test_the_expected_gradient_of_k3_plus_is_that_of_the_divergence():
    """Over the policy's own samples k3+ has the exact gradient; k1's is 0."""
    logits = torch.tensor([0.5, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()

    def gradient(estimate):
        (slope,) = torch.autograd.grad(estimate, logits)
        return slope

    policy = logits.log_softmax(-1)
    exact = gradient((policy.exp() * (policy - reference)).sum())
    for kind, expected in (("k3+", exact), ("k1+", exact), ("k1", torch.zeros(3, dtype=torch.float64))):
        policy = logits.log_softmax(-1)
        assert torch.allclose(gradient((policy.exp().detach() * kl_penalty(policy, reference, kind)).sum()), expected)


def test_importance_weights_multiply_the_loss():
    """Each token's loss, and its gradient, is its weight times what it was; the clip is not moved."""
    ratio, advantages = torch.tensor([1.5, 0.9]), torch.tensor([1.0, -1.0])
    plain = compute_policy_loss(ratio.log(), torch.zeros(2), advantages, **CLIP)
    weighted = compute_policy_loss(
        ratio.log(), torch.zeros(2), advantages, **CLIP, rollout_is_weights=torch.tensor([0.5, 2.0])
    )
    assert torch.equal(weighted.loss, plain.loss * torch.tensor([0.5, 2.0]))
    assert torch.equal(weighted.clipped, plain.clipped)


def test_k1_and_k3_estimate_the_same_divergence():
    """Averaged over the policy's own samples, k1 and k3 both are KL(policy || reference)."""
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    exact = float((policy * (policy / reference).log()).sum())
    for kind in ("kl", "low_var_kl"):
        assert float((policy * kl_penalty(policy.log(), reference.log(), kind)).sum()) == pytest.approx(exact)


def test_unknown_words_list_the_known():
    """A wrong estimator or mode names the ones there are."""
    with pytest.raises(LossError, match="low_var_kl"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k9")
    with pytest.raises(LossError, match="token-mean"):
        aggregate(torch.zeros(1, 1), torch.ones(1, 1), "mean", MiniBatch(1, 1))


PLAIN = {
    "token-mean": lambda rows: sum(map(sum, rows)) / max(sum(map(len, rows)), 1),
    "seq-mean-token-sum": lambda rows: sum(map(sum, rows)) / max(len(rows), 1),
    "seq-mean-token-mean": lambda rows: sum(sum(row) / len(row) for row in rows) / max(len(rows), 1),
}


@pytest.mark.parametrize("mode", AGGREGATIONS)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(1, 6))
def test_parts_add_up_to_the_whole(mode, lengths, size):
    """Micro-batches of any size sum to the plain formula over all rows that train; padding rows (0 tokens) are none."""
    matrix = torch.arange(len(lengths) * 5, dtype=torch.float64).reshape(-1, 5)
    mask = (torch.arange(5) < torch.tensor(lengths).unsqueeze(-1)).long()
    mini = MiniBatch.of(lengths)
    parts = [
        float(aggregate(matrix[start : start + size], mask[start : start + size], mode, mini).value)
        for start in range(0, len(lengths), size)
    ]
    rows = [values[:length] for values, length in zip(matrix.tolist(), lengths, strict=True) if length]
    assert sum(parts) == pytest.approx(PLAIN[mode](rows))


def test_junk_outside_the_mask_is_never_seen():
    """NaN on padding reaches neither the value nor the gradient."""
    matrix = torch.tensor([[1.0, float("nan")]], requires_grad=True)
    value = aggregate(matrix, torch.tensor([[1, 0]]), "token-mean", MiniBatch(1, 1)).value
    value.backward()
    assert float(value.detach()) == 1.0
    assert matrix.grad.tolist() == [[1.0, 0.0]]
