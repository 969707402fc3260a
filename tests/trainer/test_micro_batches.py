"""Micro-batches: every row once, none over the budget, and the update of the whole mini-batch whatever the packing."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lineage.trainer.batching import micro_batches
from lineage.trainer.batching.micro_batches import MicroBatchLimit, pack
from lineage.trainer.config import compose


@st.composite
def shares(draw):
    """Sequence lengths of each rank, equally many a rank, as the balance stage deals them."""
    ranks, rows = draw(st.integers(1, 4)), draw(st.integers(0, 9))
    lengths = st.lists(st.integers(2, 60), min_size=rows, max_size=rows)
    return [draw(lengths) for _ in range(ranks)]


limits = st.one_of(
    st.builds(MicroBatchLimit, rows=st.one_of(st.none(), st.integers(1, 10))),
    st.builds(MicroBatchLimit, tokens=st.integers(1, 200)),
)


@given(shares(), limits)
def test_micro_batches_tile_each_share(seq_lens, limit):
    """Every row of a rank comes once, rows keep their order inside a micro-batch, and none is empty."""
    for lens, parts in zip(seq_lens, limit.split(seq_lens), strict=True):
        assert sorted(row for part in parts for row in part) == list(range(len(lens)))
        assert all(part and part == sorted(part) for part in parts)


@given(shares(), st.integers(1, 200))
def test_no_micro_batch_is_over_its_budget_but_a_lone_row(seq_lens, budget):
    """A micro-batch of two rows or more fits the budget; a row that does not is alone."""
    for lens, parts in zip(seq_lens, pack(seq_lens, budget), strict=True):
        for part in parts:
            assert len(part) == 1 or sum(lens[row] for row in part) <= budget


@given(shares(), st.integers(1, 200))
def test_ranks_make_equally_many_forward_passes(seq_lens, budget):
    """The number of micro-batches is the same on every rank, and no fewer than the tokens ask for."""
    packed = pack(seq_lens, budget)
    assert len({len(parts) for parts in packed}) == 1
    assert len(packed[0]) >= max(-(-sum(min(length, budget) for length in lens) // budget) for lens in seq_lens)


@given(shares(), st.integers(1, 10))
def test_counted_micro_batches_are_full(seq_lens, rows):
    """By rows, all micro-batches but the last hold the limit and are contiguous."""
    for lens, parts in zip(seq_lens, MicroBatchLimit(rows=rows).split(seq_lens), strict=True):
        assert [row for part in parts for row in part] == list(range(len(lens)))
        assert all(len(part) == rows for part in parts[:-1])


def test_a_large_budget_takes_the_whole_share():
    """What fits one forward pass is one, and the smallest budget makes each row its own."""
    assert pack([[5, 6, 7]], 18) == [[[0, 1, 2]]]
    assert pack([[5, 6, 7]], 7) == [[[0], [1], [2]]]


def test_work_is_spread_over_the_micro_batches():
    """Micro-batches have nearly equal tokens: no long row shares with the others while a short one is alone."""
    lens = [40, 10, 30, 20, 25, 35]
    sums = [sum(lens[row] for row in part) for part in pack([lens], 90)[0]]
    assert sums == [80, 80]


def test_a_row_longer_than_the_budget_is_said_once(caplog):
    """One line however often such rows come, with the budget."""
    micro_batches._say_too_long.cache_clear()
    with caplog.at_level(logging.WARNING, logger=micro_batches.__name__):
        for _ in range(3):
            assert pack([[50, 3, 4]], 10) == [[[0], [1, 2]]]
    assert [record.getMessage() for record in caplog.records] == [
        "a row longer than max_token_len_per_gpu=10 is alone in its micro-batch"
    ]


@pytest.mark.parametrize(
    ("overrides", "update", "old", "ref"),
    [
        ([], MicroBatchLimit(8), MicroBatchLimit(8), MicroBatchLimit(8)),
        (
            ["actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=100"],
            MicroBatchLimit(8, 100),
            MicroBatchLimit(tokens=100),
            MicroBatchLimit(tokens=100),
        ),
        (
            [
                "actor.use_dynamic_bsz=true",
                "rollout.log_prob_use_dynamic_bsz=false",
                "ref.log_prob_max_token_len_per_gpu=7",
            ],
            MicroBatchLimit(8, 16384),
            MicroBatchLimit(8),
            MicroBatchLimit(tokens=7),
        ),
        (
            ["rollout.log_prob_use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=50"],
            MicroBatchLimit(8),
            MicroBatchLimit(tokens=50),
            MicroBatchLimit(8),
        ),
    ],
)
def test_the_log_prob_passes_fall_back_to_the_actor(overrides, update, old, ref):
    """A key the role leaves null is the actor's; one it sets is its own."""
    config = compose([f"actor_rollout_ref.{override}" for override in overrides]).actor_rollout_ref
    assert MicroBatchLimit.of_update(config.actor) == update
    assert MicroBatchLimit.of_log_prob(config.rollout, config.actor) == old
    assert MicroBatchLimit.of_log_prob(config.ref, config.actor) == ref


@pytest.fixture(scope="module")
def packed(traced_run):
    """A padded run on two ranks whose passes are all packed by tokens."""
    budget = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=110"
    return traced_run("actor_rollout_ref.actor.use_dynamic_bsz=true", budget, "trainer.total_training_steps=1")


@pytest.mark.slow
def test_a_packed_run_checks_clean(packed):
    """No code fails where micro-batches are cut by tokens, and those about cuts and losses see them."""
    kinds = packed.judged()
    assert "fail" not in kinds.values()
    assert {kinds[code] for code in ("BAT001", "BAT003", "KEY006", "LOS001", "LOS002", "TOP002")} == {"pass"}


@pytest.mark.parametrize("stage", ["old_log_prob", "ref_log_prob", "update_actor"])
def test_each_forward_pass_is_a_row_with_its_tokens(packed, stage):
    """A split row a micro-batch: rank, keys, tokens and the budget it keeps to; together they are the batch."""
    cuts = [row for row in packed.select(global_steps=1, stage=stage, op="split") if row["micro_batch"] is not None]
    lens = {}
    for row in packed.select(global_steps=1, stage=stage, op="consume", field="input_ids"):
        lens.update(zip(row["key"], row["length"], strict=True))
    assert sorted(key for row in cuts for key in row["key"]) == sorted(lens)
    for row in cuts:
        said = dict(row["attrs"])
        assert int(said["tokens"]) == sum(lens[key] for key in row["key"])
        assert said["max_token_len"] == "110"
        assert int(said["tokens"]) <= 110 or len(row["key"]) == 1
    by_rank = [sum(row["coord"]["dp"] == rank for row in cuts) for rank in (0, 1)]
    assert by_rank[0] == by_rank[1] > 1
