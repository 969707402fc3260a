"""The update: the same whatever the number of ranks or the micro-batch size."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lineage.trainer.batching.micro_batches import MicroBatchLimit
from lineage.trainer.config.actor_rollout_ref import ActorConfig
from lineage.trainer.engine.ranks import Ranks
from lineage.trainer.engine.topology import embedded_topology
from lineage.trainer.loss import AGGREGATIONS
from lineage.trainer.models import load_model
from lineage.trainer.setup import use_few_threads
from lineage.trainer.stages.update import shuffle_seed
from lineage.trainer.training import SequenceRows, TrainingWorker, infer_rows
from lineage.trainer.update_plan import Place, UpdatePlan

WHOLE = MicroBatchLimit()
PLAN = UpdatePlan(mini_batch_size=8, micro_batches=WHOLE, epochs=1, temperature=1.0, shuffle_seed=None, version=0)

PLAN_OF_16 = UpdatePlan(**{**vars(PLAN), "mini_batch_size": 16})


def make_rows(count=8, seed=0, masks=None, spread=0):
    """Random trajectories of uneven lengths, the more so the larger ``spread``, with old and reference log-probs."""
    generator = torch.Generator().manual_seed(seed)
    columns = {
        name: [] for name in ("input_ids", "attention_mask", "position_ids", "loss_mask", "old_log_probs", "advantages")
    }
    columns["ref_log_prob"] = []
    for row in range(count):
        prompt, response = 3 + row % 3 + spread * (row % 2), 2 + row % 4 + spread * (row % 3)
        ids = torch.randint(5, 90, (prompt + response,), generator=generator)
        mask = torch.ones(response, dtype=torch.long)
        if masks == "zero" or (masks == "tail" and row >= count // 2):
            mask[:] = 0
        columns["input_ids"].append(ids)
        columns["attention_mask"].append(torch.ones_like(ids))
        columns["position_ids"].append(torch.arange(len(ids)))
        columns["loss_mask"].append(mask)
        columns["old_log_probs"].append(-4.6 + 0.1 * torch.randn(response, generator=generator))
        columns["ref_log_prob"].append(-4.6 + 0.1 * torch.randn(response, generator=generator))
        columns["advantages"].append(torch.randn(1, generator=generator).expand(response) * mask)
    return SequenceRows([f"u_{row}_0" for row in range(count)], columns, [int(m.sum()) for m in columns["loss_mask"]])


def worker(tiny, ranks=1, **changes):
    """A fresh tiny model under training."""
    config = OmegaConf.structured(ActorConfig(**changes))
    model = load_model(tiny)
    use_few_threads(model)
    return TrainingWorker(model, config, embedded_topology(1, ranks), total_training_steps=10, pad_token_id=0)


def weights(training):
    """All parameters as one vector."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in training.module.parameters()])


def trained(tiny, rows, ranks=1, plan=None, **changes):
    """Weights and metrics after one update by plain gradient descent."""
    training = worker(tiny, ranks, **changes)
    # AdamW's first step is lr * sign(gradient): a coefficient that crosses 0 in the last bit would swing it
    training.optimizer = torch.optim.SGD(training.module.parameters(), lr=0.1)
    training.scheduler = torch.optim.lr_scheduler.ConstantLR(training.optimizer, factor=1.0)
    metrics = training.train_mini_batch(rows, plan or PLAN)
    return weights(training), metrics


def gradient(model, rows, ranks, limit):
    """Gradient of one mini-batch that holds all rows, as one vector; no parameter moves."""
    training = TrainingWorker(
        model, OmegaConf.structured(ActorConfig()), embedded_topology(1, ranks), total_training_steps=1, pad_token_id=0
    )
    training.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    taken = []

    def keep(*_):
        taken.append(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).clone())

    training.optimizer.register_step_pre_hook(keep)
    share = len(rows) // ranks
    shares = [rows.select(range(rank * share, (rank + 1) * share)) for rank in range(ranks)]
    # far above any norm: what is compared is the gradient, not what clipping leaves of it
    training.config.grad_clip = 1e9
    training.train_batch(shares, plan(mini_batch_size=len(rows), micro_batches=limit), Place(0, 0, 0))
    return taken[0]


def plan(**changes):
    """PLAN with changes."""
    return UpdatePlan(**{**vars(PLAN), **changes})


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 2, 3, None])
@pytest.mark.slow
def test_ranks_and_micro_batches_do_not_change_the_update(tiny, ranks, micro):
    """Any split of a mini-batch over ranks and micro-batches gives the update of one rank holding all rows."""
    rows = make_rows()
    base, base_metrics = trained(tiny, rows)
    other, metrics = trained(tiny, rows, ranks, plan(micro_batches=MicroBatchLimit(micro)))
    assert torch.allclose(base, other, atol=1e-6)
    assert not torch.equal(base, weights(worker(tiny)))
    for name, value in base_metrics.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 99), st.sampled_from([1, 2, 4]), st.integers(1, 70), st.sampled_from([2, 4]))
def test_packing_by_tokens_does_not_change_the_gradient(tiny_model, seed, ranks, budget, per_rank):
    """Whatever the lengths, the budget and the ranks, the gradient is that of the whole mini-batch in one pass."""
    rows = make_rows(ranks * per_rank, seed, spread=seed % 7)
    whole = gradient(tiny_model, rows, 1, WHOLE)
    packed = gradient(tiny_model, rows, ranks, MicroBatchLimit(tokens=budget))
    assert torch.allclose(whole, packed, atol=1e-6, rtol=1e-4)
    assert whole.abs().max() > 1e-4


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 99), st.integers(1, 3), st.integers(1, 70), st.integers(1, 7))
def test_inference_gives_the_rows_back_in_their_order(tiny_model, seed, ranks, budget, count):
    """Packed by tokens or one by one, each row's values stand where the row does."""
    rows = make_rows(count, seed, spread=seed % 7)
    score = {"temperature": 1.0, "with_entropy": True, "pad_token_id": 0}
    alone = infer_rows(tiny_model, rows, micro_batches=MicroBatchLimit(1), ranks=Ranks.embedded(1), **score)
    packed = infer_rows(
        tiny_model, rows, micro_batches=MicroBatchLimit(tokens=budget), ranks=Ranks.embedded(ranks), **score
    )
    one, entropy, two, other = alone.log_probs, alone.entropy, packed.log_probs, packed.entropy
    assert [len(row) for row in two] == rows.lengths("input_ids")
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip([*one, *entropy], [*two, *other], strict=True))


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.one_of(st.none(), st.integers(0, 9)),
)
def test_mini_batches_cover_the_batch_once_an_epoch(tiny_worker, ranks, per_rank, minis, epoch, seed):
    """Every row comes once an epoch, each rank's rows stay with it, and mini-batches have M x G rows."""
    tiny_worker.ranks = Ranks.embedded(ranks)
    count = ranks * per_rank * minis
    walk = plan(mini_batch_size=ranks * per_rank, shuffle_seed=seed)
    batches = list(tiny_worker._mini_batches(count, walk, epoch))
    assert len(batches) == minis
    assert all(len(shares) == ranks and {len(share) for share in shares} == {per_rank} for shares in batches)
    assert sorted(row for shares in batches for share in shares for row in share) == list(range(count))
    for rank in range(ranks):
        held = {row for shares in batches for row in shares[rank]}
        assert held == set(range(rank * per_rank * minis, (rank + 1) * per_rank * minis))


@pytest.fixture(scope="module")
def tiny_model(tiny):
    """The tiny model, for tests that move no parameter."""
    return worker(tiny).module


@pytest.fixture(scope="module")
def tiny_worker(tiny):
    """A worker whose ranks a test may change."""
    return worker(tiny)


@given(st.integers(0, 9), st.integers(1, 60), st.integers(0, 3), st.integers(0, 3))
def test_every_update_has_an_order_of_its_own(seed, step, sub_step, other):
    """The seed, the step and the batch of the step make the order: the same ones the same, others another."""
    same = [
        shuffle_seed(seed, step, sub_step) == shuffle_seed(*at)
        for at in ((seed, step + 1, sub_step), (seed, step, other))
    ]
    assert same == [False, other == sub_step]


@given(st.integers(0, 10_000), st.integers(0, 3))
def test_shuffling_is_seeded(tiny_worker, seed, epoch):
    """The same seed gives the same order, which is not the batch's own; another epoch another one."""
    tiny_worker.ranks = Ranks.embedded(1)
    walk = plan(mini_batch_size=16, shuffle_seed=seed)
    orders = [list(tiny_worker._mini_batches(16, walk, at)) for at in (epoch, epoch, epoch + 1)]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[0] != list(tiny_worker._mini_batches(16, PLAN_OF_16, epoch))


def test_a_batch_that_does_not_divide_is_refused(tiny_worker):
    """The worker pads nothing itself and says who does."""
    tiny_worker.ranks = Ranks.embedded(1)
    with pytest.raises(ValueError, match="balance stage pads"):
        list(tiny_worker._mini_batches(9, PLAN, 0))


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_padding_rows_change_no_weight(tiny, mode):
    """Rows with mask 0 take part in no sum and no denominator, whatever the loss is a mean over."""
    half = make_rows(4)
    padded = make_rows(8, masks="tail")
    for name, column in half.columns.items():
        padded.columns[name][:4] = column
    base, _ = trained(tiny, half, plan=plan(mini_batch_size=4), loss_agg_mode=mode)
    cut = plan(mini_batch_size=8, micro_batches=MicroBatchLimit(2))
    other, _ = trained(tiny, padded, ranks=2, plan=cut, loss_agg_mode=mode)
    assert torch.allclose(base, other, atol=1e-6)


@pytest.mark.parametrize("masks", ["zero", "nan"])
@pytest.mark.filterwarnings("error")
def test_an_unusable_gradient_skips_the_step(tiny, masks):
    """No token to train, or a gradient that is not finite: weights and moments stay, the schedule moves, no warning."""
    rows = make_rows(8, masks="zero" if masks == "zero" else None)
    if masks == "nan":
        rows.columns["advantages"][0] = torch.full_like(rows.columns["advantages"][0], math.nan)
    training = worker(tiny)
    before = weights(training)
    metrics = training.train_mini_batch(rows, PLAN)
    assert torch.equal(weights(training), before)
    assert not training.optimizer.state
    assert metrics["actor/skipped_steps"] == 1.0
    assert training.scheduler.last_epoch == 1


def test_epochs_and_mini_batches_are_optimiser_steps(tiny):
    """E epochs of N / (M x G) mini-batches are that many steps of the optimiser and one of the schedule."""
    training = worker(tiny)
    training.train_mini_batch(make_rows(8), plan(mini_batch_size=4, epochs=3))
    assert next(iter(training.optimizer.state.values()))["step"] == 6
    assert training.scheduler.last_epoch == 1


def test_positive_advantage_raises_the_probability(tiny):
    """After an update every token of a well-scored row is more probable, in sum."""
    rows = make_rows(8)
    for row, mask in enumerate(rows.columns["loss_mask"]):
        rows.columns["advantages"][row] = torch.ones(len(mask))
    training = worker(tiny, use_kl_loss=False)
    options = {"micro_batches": MicroBatchLimit(4), "temperature": 1.0, "with_entropy": False}
    before = training.infer_batch(rows, **options).log_probs
    for row, mask in enumerate(rows.columns["loss_mask"]):
        window = before[row][len(before[row]) - len(mask) - 1 : -1]
        rows.columns["old_log_probs"][row] = window.clone()
    training.train_mini_batch(rows, PLAN)
    after = training.infer_batch(rows, **options).log_probs
    gains = [
        float((new - old)[len(new) - len(mask) - 1 : -1].sum())
        for new, old, mask in zip(after, before, rows.columns["loss_mask"], strict=True)
    ]
    assert sum(gains) > 0


def test_the_kl_term_reaches_the_gradient(tiny):
    """A large coefficient changes the update; without the term the reference is not even read."""
    rows = make_rows()
    strong, _ = trained(tiny, rows, kl_loss_coef=10.0)
    none, metrics = trained(tiny, rows, use_kl_loss=False)
    assert not torch.allclose(strong, none, atol=1e-4)
    assert "actor/kl_loss" not in metrics


def test_inference_leaves_no_trace(tiny):
    """Scoring twice gives the same values, takes no gradient and stays in eval mode."""
    training = worker(tiny)
    options = {"micro_batches": MicroBatchLimit(3), "temperature": 0.7, "with_entropy": True}
    rows = make_rows()
    scores = training.infer_batch(rows, **options)
    first, entropy = scores.log_probs, scores.entropy
    second = training.infer_batch(rows, **options).log_probs
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
    assert [len(row) for row in first] == [len(row) for row in entropy] == rows.lengths("input_ids")
    assert not any(row.requires_grad for row in first)
    assert all(float(row[-1]) == 0.0 for row in first)
    assert not training.module.training
