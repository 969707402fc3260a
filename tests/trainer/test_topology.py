"""Logical data-parallel size from parallel sizes."""

from __future__ import annotations

import pytest

from lineage.trainer.engine.topology import (
    TopologyError,
    embedded_topology,
    fsdp_data_parallel_size,
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
