"""The seeds' arithmetic of B, M, G, E and K."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lineage.trainer.batching.batch_sizes import BatchSizes
from lineage.trainer.config import compose

small = st.integers(1, 6)


@given(small, small, small, small, small)
def test_a_batch_that_divides_follows_the_formulas(minis, mini, sessions, epochs, syncs):
    """B x G trajectories, mini-batches of M x G, B / M of them an epoch, E x B / M updates a step."""
    whole = minis * mini * syncs
    sizes = BatchSizes(whole, mini, sessions, epochs, syncs)
    assert sizes.trajectories * syncs == whole * sessions
    assert sizes.mini_batch_rows == mini * sessions
    assert sizes.missing(sizes.trajectories) == 0
    assert sizes.mini_batches(sizes.trajectories) * syncs == whole // mini
    assert syncs * sizes.updates(sizes.trajectories) == epochs * whole // mini


@given(st.integers(1, 300), small, small, small, small)
def test_padding_reaches_the_next_multiple(rows, mini, sessions, epochs, ranks):
    """The padded batch divides into mini-batches and ranks, no smaller padding would do, every row is trained on."""
    sizes = BatchSizes(rows, mini, sessions, epochs, dp_size=ranks)
    missing = sizes.missing(rows)
    assert 0 <= missing < sizes.required_multiple
    assert (rows + missing) % sizes.mini_batch_rows == 0
    assert (rows + missing) % ranks == 0
    assert sizes.updates(rows) == epochs * (rows + missing) // sizes.mini_batch_rows


def test_sizes_come_from_verls_keys():
    """Each letter is read from the key that holds it."""
    config = compose(
        [
            "data.train_batch_size=12",
            "actor_rollout_ref.actor.ppo_mini_batch_size=3",
            "actor_rollout_ref.actor.ppo_epochs=2",
            "actor_rollout_ref.rollout.n=5",
            "trainer.v1.sync.parameter_sync_step=4",
        ]
    )
    assert BatchSizes.of(config, 7) == BatchSizes(12, 3, 5, 2, 4, 7)
