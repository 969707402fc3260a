"""Rollout correction: weights and rejection, checked against plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lineage.trainer.config.ppo_trainer import RolloutCorrectionConfig
from lineage.trainer.correction.off_policy import off_policy_metrics
from lineage.trainer.correction.rejection_rules import REJECTIONS, RejectionError, rejection_rules
from lineage.trainer.correction.rollout_correction import (
    CorrectionError,
    compute_rollout_correction,
    importance_weights,
    rejected_rows,
)

ROWS = st.lists(
    st.lists(st.tuples(st.floats(-3, 0), st.floats(-3, 0), st.booleans()), min_size=1, max_size=4),
    min_size=1,
    max_size=4,
)


def tensors(rows):
    """Trained log-probs, sampled ones and mask of rows of (trained, sampled, policy token), padded."""
    width = max(map(len, rows))
    whole = [[*row, *[(9.0, -9.0, False)] * (width - len(row))] for row in rows]
    train, sampled, mask = (torch.tensor([[token[i] for token in row] for row in whole]) for i in range(3))
    return train.double(), sampled.double(), mask.long()


def correct(rows, **config):
    """The correction of such rows."""
    return compute_rollout_correction(*tensors(rows), OmegaConf.structured(RolloutCorrectionConfig(**config)))


def ratios(row):
    """log(pi_train / pi_rollout) of the policy tokens of a row."""
    return [train - sampled for train, sampled, policy in row if policy]


@settings(max_examples=40)
@given(ROWS, st.sampled_from(["token", "sequence"]), st.floats(0.5, 4), st.booleans())
def test_weights_are_the_plain_formula(rows, level, threshold, normalise):
    """Token: the ratio; sequence: the product of the ratios; cut at the threshold; then over the mean of the batch."""
    result = correct(
        rows, rollout_is=level, rollout_is_threshold=threshold, rollout_is_batch_normalize=normalise
    ).rollout_is_weights
    expected = []
    for row in rows:
        whole = math.exp(sum(ratios(row)))
        weights = [whole if level == "sequence" else math.exp(train - sampled) for train, sampled, _ in row]
        expected.append([min(w, threshold) if policy else 0.0 for w, (_, _, policy) in zip(weights, row, strict=True)])
    if normalise:
        counted = 1 if level == "sequence" else None  # a response once, a token each
        units = []
        for row, source in zip(expected, rows, strict=True):
            units += [weight for weight, (*_, policy) in zip(row, source, strict=True) if policy][:counted]
        mean = sum(units) / len(units) if units else 1.0
        expected = [[weight / mean for weight in row] for row in expected]
    for got, wanted in zip(result.tolist(), expected, strict=True):
        assert got[: len(wanted)] == pytest.approx(wanted, rel=1e-6, abs=1e-9)
        assert not any(got[len(wanted) :])


@settings(max_examples=40)
@given(ROWS, st.sampled_from(REJECTIONS), st.floats(1.0, 3.0))
def test_rejection_is_the_plain_formula(rows, name, bound):
    """Tokens, or whole responses, whose estimate leaves its bounds lose their mask; no token gains one."""
    result = correct(rows, rollout_rs=name, rollout_rs_threshold=bound)
    (rule,) = rejection_rules(name, bound)
    estimators = {"k1": lambda r: -r, "k2": lambda r: r * r / 2, "k3": lambda r: math.exp(r) - 1 - r}
    reduce = {"seq_sum": sum, "seq_mean": lambda v: sum(v) / len(v), "seq_max": max}
    near = []
    for row, after in zip(rows, result.response_mask.tolist(), strict=True):
        values = [estimators[rule.estimator](r) for r in ratios(row)]
        if rule.level != "token":
            values = [reduce[rule.level](values)] * len(values) if values else []
        near += [value for value in values if min(abs(value - rule.lower), abs(value - rule.upper)) < 1e-9]
        kept = iter(rule.lower <= value <= rule.upper for value in values)
        expected = [int(policy and next(kept)) for *_, policy in row]
        if not near:
            assert after == expected + [0] * (len(after) - len(row))


def test_nothing_asked_for_changes_nothing():
    """Without weights or rejection the mask is the one that came, and the divergence is still reported."""
    rows = [[(-1.0, -1.5, True), (-1.0, -1.0, False)]]
    result = correct(rows)
    assert result.rollout_is_weights is None
    assert torch.equal(result.response_mask, tensors(rows)[2])
    assert result.metrics["rollout_corr/kl"] == pytest.approx(-0.5)


def test_several_rules_must_all_be_kept_to():
    """A token that breaks one of two rules is rejected, and each rule reports its own share."""
    rows = [[(-1.0, -1.0, True), (-1.0, -2.0, True)], [(-1.0, -1.1, True), (-1.0, -1.1, True)]]
    result = correct(rows, rollout_rs="token_k1,seq_max_k2", rollout_rs_threshold="0.5_2.0,0.004")
    assert result.response_mask.tolist() == [[0, 0], [0, 0]]
    assert result.metrics["rollout_corr/rollout_rs_token_k1_masked_fraction"] == 0.25
    assert result.metrics["rollout_corr/rollout_rs_seq_max_k2_masked_fraction"] == 1.0
    assert result.metrics["rollout_corr/rollout_rs_masked_fraction"] == 1.0
    assert result.metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 1.0


@settings(max_examples=40)
@given(ROWS)
def test_padding_rows_are_in_no_metric(rows):
    """Rows without a policy token change no metric."""
    padding = [[(-3.0, -1.0, False)]]
    config = {"rollout_is": "sequence", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.5}
    plain, padded = correct(rows, **config).metrics, correct(rows + padding, **config).metrics
    assert plain.keys() == padded.keys()
    assert all(padded[name] == pytest.approx(value, rel=1e-9, abs=1e-12) for name, value in plain.items())


def test_the_divergence_is_measured_by_hand():
    """Two rows of known log-probs: KL, perplexities and chi squared by their formulas."""
    rows = [[(-1.0, -2.0, True), (-3.0, -2.0, True)], [(-2.0, -1.0, True)]]
    metrics = off_policy_metrics(*tensors(rows))
    assert metrics["kl"] == pytest.approx((-1.0 + 1.0 + 1.0) / 3)
    assert metrics["training_ppl"] == pytest.approx(math.exp(2.0))
    assert metrics["rollout_ppl"] == pytest.approx((math.exp(2.0) + math.exp(1.0)) / 2)
    assert metrics["log_ppl_diff"] == pytest.approx((0.0 + 1.0) / 2)
    assert metrics["ppl_ratio"] == pytest.approx((1.0 + math.e) / 2)
    assert metrics["chi2_token"] == pytest.approx((math.exp(2) + 2 * math.exp(-2)) / 3 - 1)
    assert metrics["chi2_seq"] == pytest.approx((1.0 + math.exp(-2)) / 2 - 1)


def test_equal_weights_have_the_greatest_sample_size():
    """The effective sample size is 1 of 1 when all weights agree, and less when they do not."""
    same = correct([[(-1.0, -1.0, True)] * 3], rollout_is="token").metrics
    other = correct([[(-1.0, -1.0, True), (-1.0, -1.5, True)]], rollout_is="token").metrics
    assert same["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1.0)
    assert other["rollout_corr/rollout_is_eff_sample_size"] < 0.99


# responses of 1 and 3 tokens, whose ratios are e and e**-6
UNEQUAL = [[(-1.0, -2.0, True)], [(-3.0, -1.0, True)] * 3]


def test_extremes_of_sequence_weights_are_those_before_the_cut():
    """And each response counts once in their shares beyond the bounds; of token weights it is what was cut."""
    whole = correct(UNEQUAL, rollout_is="sequence").metrics
    assert whole["rollout_corr/rollout_is_max"] == pytest.approx(math.e)
    assert whole["rollout_corr/rollout_is_min"] == pytest.approx(math.exp(-6))
    assert whole["rollout_corr/rollout_is_ratio_fraction_high"] == 0.5
    assert whole["rollout_corr/rollout_is_ratio_fraction_low"] == 0.5
    each = correct(UNEQUAL, rollout_is="token").metrics
    assert each["rollout_corr/rollout_is_max"] == 2.0
    assert each["rollout_corr/rollout_is_ratio_fraction_high"] == 0.25


def test_the_mean_of_a_rejection_estimate_is_over_tokens():
    """A response's estimate weighs as much as it has tokens; the shares beyond the bounds count it once."""
    metrics = correct(UNEQUAL, rollout_rs="seq_mean_k2", rollout_rs_threshold=1.0).metrics
    assert metrics["rollout_corr/rollout_rs_seq_mean_k2_mean"] == pytest.approx((0.5 + 3 * 2.0) / 4)
    assert metrics["rollout_corr/rollout_rs_seq_mean_k2_max"] == pytest.approx(2.0)
    assert metrics["rollout_corr/rollout_rs_seq_mean_k2_fraction_high"] == 0.5


def test_rejected_rows_are_named():
    """A row that lost a token says so; one that lost none says nothing."""
    before, after = torch.tensor([[1, 1], [1, 0]]), torch.tensor([[1, 0], [1, 0]])
    assert rejected_rows(before, after) == ["rejected", None]


@pytest.mark.parametrize(
    ("name", "bound", "says"),
    [
        ("token_k9", 1.0, "unknown; choose from token_k1"),
        ("", 1.0, "unknown"),
        ("seq_max_k1", 2.0, "unknown"),
        ("token_k2", None, "needs one bound"),
        ("token_k2,token_k3", "1,2,3", "or 2 with commas"),
        ("token_k2", "0.5_2.0", "a number greater than 0"),
        ("token_k2", "-1", "a number greater than 0"),
        ("token_k1", "0.5", "at least 1"),
        ("token_k1", "2_0.5", "both greater than 0"),
        ("token_k1", "wide", "lower_upper"),
        ("token_k3", "nan", "a number greater than 0"),
    ],
)
def test_a_rule_that_cannot_be_read_is_one_line(name, bound, says):
    """The line says what is wanted."""
    with pytest.raises(RejectionError, match=says) as caught:
        rejection_rules(name, bound)
    assert "\n" not in str(caught.value)


def test_one_bound_of_a_ratio_stands_for_both_sides():
    """``2.0`` on a k1 rule means from 1/2 to 2; one bound serves all rules."""
    first, second = rejection_rules("token_k1, seq_sum_k3", 2.0)
    assert (first.lower, first.upper) == pytest.approx((-math.log(2), math.log(2)))
    assert (second.level, second.estimator, second.lower, second.upper) == ("seq_sum", "k3", -math.inf, 2.0)
    assert rejection_rules(None, None) == []


def test_an_unknown_level_is_one_line():
    """The line names the two there are."""
    with pytest.raises(CorrectionError, match="choose token or sequence"):
        importance_weights(torch.zeros(1, 1), torch.ones(1, 1), "group")
