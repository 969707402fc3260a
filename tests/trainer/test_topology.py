"""Logical data-parallel size from parallel sizes."""

from __future__ import annotations

import pytest

from lineage.trainer.engine.topology import (
    TopologyError,
    embedded_topology,
    fsdp_data_parallel_size,
    shard_ranks,
    world_size,
)


def test_fsdp_divides_by_ulysses_only():
    """Under FSDP the actor's DP is world / SP."""
    assert fsdp_data_parallel_size(8) == 8
    assert fsdp_data_parallel_size(8, sp=2) == 4


def test_embedded_reports_every_simulated_rank():
    """The embedded engine plays nodes x devices ranks and says so."""
    topology = embedded_topology(2, 3)
    assert (topology.backend, topology.world_size, topology.reported_dp, topology.rollout_dp) == ("single", 6, 6, 1)


@pytest.mark.parametrize("call", [lambda: fsdp_data_parallel_size(8, sp=3), lambda: world_size(0, 4)])
def test_sizes_that_do_not_multiply_are_an_error(call):
    """A world that does not divide, or is empty, is one clear line."""
    with pytest.raises(TopologyError):
        call()


def test_one_copy_of_the_model_is_spread_over_a_divisor_of_the_ranks():
    """-1, and more than there are, is all of them."""
    assert [shard_ranks(4, size) for size in (-1, 1, 2, 4, 8)] == [4, 1, 2, 4, 4]


@pytest.mark.parametrize("size", [0, -2, 3])
def test_a_size_that_does_not_divide_is_one_line(size):
    """It names the key to set."""
    with pytest.raises(TopologyError, match=r"fsdp_config\.fsdp_size=.* does not divide 4 ranks"):
        shard_ranks(4, size)
