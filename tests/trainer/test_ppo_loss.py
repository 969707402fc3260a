"""The loss of a mini-batch: how it is cut changes nothing, which tokens count, and what is said of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lineage.trainer.config.actor_rollout_ref import ActorConfig
from lineage.trainer.config.ppo_trainer import RolloutCorrectionConfig
from lineage.trainer.loss import AGGREGATIONS, MiniBatch
from lineage.trainer.ppo_loss import PolicyRows, bypass_metrics, loss_metrics, ppo_loss

WIDTH = 4
MODES = st.sampled_from(AGGREGATIONS)
LENGTHS = st.lists(st.integers(1, WIDTH), min_size=1, max_size=5)


def actor(**changes):
    """A configuration with every term in the loss."""
    defaults = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k2", "entropy_coeff": 0.1}
    return OmegaConf.structured(ActorConfig(**{**defaults, **changes}))


def make(lengths, seed=0):
    """Rows of these token counts; the policy is a free parameter."""
    generator = torch.Generator().manual_seed(seed)

    def values(scale=1.0):
        return scale * torch.randn(len(lengths), WIDTH, generator=generator, dtype=torch.float64)

    mask = (torch.arange(WIDTH) < torch.tensor(lengths).unsqueeze(-1)).long()
    policy = values(0.3).requires_grad_()
    return policy, PolicyRows(policy, values(0.3), values(), mask, policy.square(), values(0.3))


def part(rows, places):
    """Some rows."""
    columns = {name: value[places] for name, value in vars(rows).items() if value is not None}
    return PolicyRows(**columns)


def gradient(config, policy, rows, cuts, correction=None, counts=None):
    """Gradient by the policy of the losses of the micro-batches ``cuts``, added up."""
    mini = MiniBatch.of(rows.mask.sum(dim=-1).tolist() if counts is None else counts)
    loss = sum(ppo_loss(config, part(rows, places), mini, correction).value for places in cuts)
    return torch.autograd.grad(loss, policy, retain_graph=True)[0]


@settings(max_examples=15)
@given(LENGTHS, st.integers(0, 3), st.integers(1, 4), MODES, st.randoms(use_true_random=False))
def test_cutting_and_padding_do_not_change_the_gradient(lengths, padding, size, mode, random):
    """Any order, any micro-batches, any number of padding rows: the gradient of one pass over the real rows."""
    config = actor(loss_agg_mode=mode)
    policy, rows = make([*lengths, *[0] * padding])
    real = list(range(len(lengths)))
    whole = gradient(config, policy, part(rows, real), [real])
    order = list(range(len(lengths) + padding))
    random.shuffle(order)
    cuts = [order[start : start + size] for start in range(0, len(order), size)]
    assert torch.allclose(gradient(config, policy, rows, cuts), whole, atol=1e-12)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_the_gradient_is_the_plain_formula(mode):
    """One row of 1 and one of 2 tokens, no clip in sight: each token's weight in the loss by hand."""
    config = actor(loss_agg_mode=mode, use_kl_loss=False, entropy_coeff=0.0)
    policy, rows = make([1, 2])
    rows = PolicyRows(policy, policy.detach(), rows.advantages, rows.mask)
    weights = {
        "token-mean": [[1 / 3, 0], [1 / 3, 1 / 3]],
        "seq-mean-token-sum": [[1 / 2, 0], [1 / 2, 1 / 2]],
        "seq-mean-token-mean": [[1 / 2, 0], [1 / 4, 1 / 4]],
    }[mode]
    expected = -rows.advantages[:, :2] * torch.tensor(weights, dtype=torch.float64)
    assert torch.allclose(gradient(config, policy, rows, [[0, 1]])[:, :2], expected)


def test_the_entropy_bonus_lowers_the_loss():
    """The loss is the policy loss less coefficient times entropy, plus coefficient times KL."""
    _, rows = make([2, 3])
    mini = MiniBatch(2, 5)
    with_terms = ppo_loss(actor(), rows, mini)
    shares = {name: float(term.share.value.detach()) for name, term in with_terms.terms.items()}
    expected = shares["pg_loss"] - 0.1 * shares["entropy_loss"] + 0.3 * shares["kl_loss"]
    assert float(with_terms.value.detach()) == pytest.approx(expected)
    assert shares["entropy_loss"] == pytest.approx(float((rows.entropy * rows.mask).sum().detach()) / 5)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_rejected_tokens_stay_in_the_denominator(mode):
    """As in verl: the numerator is over the rewritten mask, the denominator over the mask of the rollout."""
    config = actor(loss_agg_mode=mode, use_kl_loss=False, entropy_coeff=0.0)
    _, rows = make([0, 2])  # the first row, of 3 tokens, was rejected
    loss = ppo_loss(config, rows, MiniBatch.of([3, 2]))
    term = loss.terms["pg_loss"]
    assert term.share.denominator == (5 if mode == "token-mean" else 2)
    assert int(term.tokens) == 2


def test_in_bypass_mode_the_current_policy_rejects():
    """Only the policy term loses its tokens; the mask of the others, and every denominator, stays."""
    policy = torch.tensor([[0.0, -1.0]], dtype=torch.float64, requires_grad=True)
    old = torch.zeros(1, 2, dtype=torch.float64)
    rows = PolicyRows(policy, old, torch.ones_like(old), torch.ones(1, 2).long(), ref_log_prob=old)
    correction = OmegaConf.structured(
        RolloutCorrectionConfig(bypass_mode=True, rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold=2.0)
    )
    loss = ppo_loss(actor(kl_loss_type="k2"), rows, MiniBatch(1, 2), correction)
    assert loss.policy_mask.tolist() == [[1, 0]]
    assert {name: int(term.tokens) for name, term in loss.terms.items()} == {"pg_loss": 1, "kl_loss": 2}
    assert float(loss.terms["pg_loss"].share.value.detach()) == pytest.approx(-1.0 / 2)  # ratio 1, no importance weight
    metrics = bypass_metrics([rows.detached()], correction)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.5
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx((1 + math.exp(-1)) / 2)


@pytest.mark.parametrize(
    ("kind", "replayed"),
    [
        ("k1", lambda said: -said["kl_gap"]),
        ("k2", lambda said: said["kl_gap_squared"] / 2),
        ("k3", lambda said: said["kl_excess"]),
    ],
)
def test_the_kl_replays_from_what_is_said_of_it(kind, replayed):
    """While tracing the ledger says what each estimator follows from; it is no metric, and else it is not said."""
    _, rows = make([3, 2])
    gaps = torch.tensor([[0.3, -0.2, 0.1, 9.0], [0.5, 0.4, 9.0, 9.0]])
    rows = replace(rows, ref_log_prob=rows.log_prob.detach() + gaps)
    config, mini = actor(kl_loss_type=kind), MiniBatch.of([3, 2])
    loss = ppo_loss(config, rows, mini, per_token=True)
    terms, watched = loss.read(iter([float(scalar.detach()) for scalar in loss.scalars()]))
    said = {name: float(value) for name, value in loss.attrs("kl_loss", watched).items()}
    (kl,) = (term for term in terms if term.term == "kl_loss")
    assert replayed(said) == pytest.approx(kl.numerator)
    assert said["kl_gap_most"] == pytest.approx(0.5)
    assert not [name for name in loss_metrics([(terms, watched)]) if "gap" in name]
    assert ppo_loss(config, rows, mini).attrs("kl_loss", {}) == {}


@settings(max_examples=12)
@given(LENGTHS, MODES)
def test_what_is_said_of_the_loss_adds_up_to_it(lengths, mode):
    """scale * numerator / denominator over the recorded terms is the loss; clip shares are means over its tokens."""
    config = actor(loss_agg_mode=mode)
    _, rows = make(lengths)
    mini = MiniBatch.of(lengths)
    done = [ppo_loss(config, part(rows, [row]), mini) for row in range(len(lengths))]
    read = [loss.read(iter([float(scalar.detach()) for scalar in loss.scalars()])) for loss in done]
    terms = [term for said, _ in read for term in said]
    total = sum(term.scale * term.numerator / term.denominator for term in terms)
    assert total == pytest.approx(float(sum(loss.value.detach() for loss in done)))
    assert sum(term.tokens for term in terms if term.term == "pg_loss") == sum(lengths)
    metrics = loss_metrics(read)
    ratio = (rows.log_prob - rows.old_log_prob).detach()
    assert metrics["actor/ppo_kl"] == pytest.approx(-float(ratio[rows.mask.bool()].mean()), abs=1e-12)
