"""Logical data-parallel size from parallel sizes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lineage.trainer.engine.topology import (
    MegatronLayout,
    TopologyError,
    embedded_topology,
    fsdp_data_parallel_size,
    fsdp_topology,
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


sizes = st.integers(1, 4)


@given(dp=sizes, sp=sizes, fsdp_size=st.sampled_from([-1, 1]), rollout_tp=sizes, rollout_dp=sizes)
def test_fsdp_deals_a_batch_to_replicas_of_sp_ranks(dp, sp, fsdp_size, rollout_tp, rollout_dp):
    """DP x SP is the world, and neither fsdp_size nor the rollout's sizes enter."""
    topology = fsdp_topology(dp * sp, fsdp_size, rollout_dp, sp=sp, rollout_tp=rollout_tp)
    assert (topology.reported_dp, topology.sp, topology.tp) == (dp, sp, 1)
    assert (topology.rollout_tp, topology.rollout_dp) == (rollout_tp, rollout_dp)


@st.composite
def layouts(draw: st.DrawFn) -> MegatronLayout:
    """A layout that Megatron would build: the dense sizes make the world, the experts divide each pipeline stage."""
    tp, pp, cp, dp = (draw(sizes) for _ in range(4))
    stage = tp * cp * dp
    etp = draw(st.sampled_from([None, *(size for size in range(1, stage + 1) if stage % size == 0)]))
    left = stage // (tp if etp is None else etp)
    ep = draw(st.sampled_from([size for size in range(1, left + 1) if left % size == 0]))
    return MegatronLayout(stage * pp, tp, pp, cp, ep, etp)


@given(layouts())
def test_megatron_divides_by_tp_pp_cp(layout):
    """Its DP times the model parallel sizes is the world, and so for the experts; EP leaves the batch's DP alone."""
    assert layout.data_parallel_size * layout.tp * layout.pp * layout.cp == layout.world
    assert layout.expert_data_parallel_size * layout.expert_tp * layout.ep * layout.pp == layout.world
    assert replace(layout, ep=1, etp=None).data_parallel_size == layout.data_parallel_size


@given(layouts())
def test_replicas_are_disjoint_and_cover_the_world(layout):
    """Each rank is in one replica; a data-parallel group has one rank of each, in their order."""
    replicas = layout.replicas()
    assert sorted(itertools.chain(*replicas)) == list(range(layout.world))
    assert {len(replica) for replica in replicas} == {layout.tp * layout.pp * layout.cp}
    for group in layout.data_parallel_groups():
        assert [next(i for i, replica in enumerate(replicas) if rank in replica) for rank in group] == list(
            range(layout.data_parallel_size)
        )


@given(layouts())
def test_data_parallel_groups_partition_the_world(layout):
    """Ranks of one group differ in their DP place alone; those of experts share stage and place in EP."""
    for groups, apart in (
        (layout.data_parallel_groups(), ("tp", "cp", "pp")),
        (layout.expert_data_parallel_groups(), ("pp", "ep")),
    ):
        assert sorted(itertools.chain(*groups)) == list(range(layout.world))
        for group in groups:
            assert len({tuple(layout.coord(rank)[name] for name in apart) for rank in group}) == 1
    assert {len(group) for group in layout.data_parallel_groups()} == {layout.data_parallel_size}
    assert {len(group) for group in layout.expert_data_parallel_groups()} == {layout.expert_data_parallel_size}


@given(layouts(), sizes, sizes)
def test_dynamic_context_parallel_is_one_replica(layout, rollout_tp, rollout_dp):
    """Its logical DP is 1: every rank is handed the whole batch, whatever the process groups are."""
    dynamic = replace(layout, dynamic_cp=True)
    assert dynamic.replicas() == [list(range(layout.world))]
    assert (
        len({(place["tp"], place["cp"], place["pp"]) for place in map(dynamic.coord, range(layout.world))})
        == layout.world
    )
    assert dynamic.data_parallel_groups() == layout.data_parallel_groups()
    topology = dynamic.topology(rollout_tp, rollout_dp)
    assert (topology.reported_dp, topology.dynamic_cp, topology.rollout_tp) == (1, True, rollout_tp)


@given(st.integers(0, 12), *[st.integers(0, 4)] * 5)
def test_sizes_megatron_cannot_build_are_one_line(world, tp, pp, cp, ep, etp):
    """Whatever does not divide the world, or is no size, is an error that names the sizes; everything else is built."""
    dense, expert = tp * pp * cp, etp * ep * pp
    if min(world, dense, expert) > 0 and world % math.lcm(dense, expert) == 0:
        assert MegatronLayout(world, tp, pp, cp, ep, etp).topology().world_size == world
        return
    with pytest.raises(TopologyError, match=rf"^world size {world} does not divide by .*parallel_size=.*[^\n]$"):
        MegatronLayout(world, tp, pp, cp, ep, etp)
