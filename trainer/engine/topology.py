"""Logical data-parallel size of the actor, as pure functions of the parallel sizes.

The seeds' rule ("Training backend 中的 batch mapping"): FSDP divides the world by Ulysses SP whatever ``fsdp_size`` is.
The rollout's tensor parallelism says how replicas occupy devices and never enters.
"""

from __future__ import annotations

from typing import Any

from lineage.hooks import Topology, UserError


class TopologyError(UserError):
    """The parallel sizes do not multiply to the world size."""


def world_size(nnodes: int, n_gpus_per_node: int) -> int:
    """Ranks of the training job: ``trainer.nnodes * trainer.n_gpus_per_node``."""
    world = nnodes * n_gpus_per_node
    if world < 1:
        raise TopologyError(
            f"trainer.nnodes={nnodes} x trainer.n_gpus_per_node={n_gpus_per_node} is no rank: set both to 1 or more"
        )
    return world


def fsdp_data_parallel_size(world: int, sp: int = 1) -> int:
    """Actor DP under FSDP: ``world / sp`` (verl ``FSDPEngine.get_data_parallel_size``).

    ``fsdp_size`` shapes the parameter shards, not the batch, so it is no argument.

    Raises:
        TopologyError: ``sp`` does not divide the world.
    """
    if sp < 1 or world % sp:
        raise TopologyError(
            f"world size {world} does not divide by ulysses_sequence_parallel_size={sp}: choose a divisor of it"
        )
    return world // sp


def shard_ranks(world: int, fsdp_size: int) -> int:
    """Ranks that one copy of the model is spread over: ``fsdp_size``; all of them where it is -1 or no less.

    Raises:
        TopologyError: the world is no multiple of it.
    """
    if fsdp_size == -1 or fsdp_size >= world:
        return world
    if fsdp_size < 1 or world % fsdp_size:
        raise TopologyError(
            f"actor_rollout_ref.actor.fsdp_config.fsdp_size={fsdp_size} does not divide {world} ranks: choose a "
            "divisor of them, or -1 for all"
        )
    return fsdp_size


def embedded_topology(nnodes: int, n_gpus_per_node: int) -> Topology:
    """What the embedded engine reports: one process plays ``nnodes * n_gpus_per_node`` data-parallel ranks in turn.

    No dimension of the model is parallel here, and one rollout replica serves all ranks.
    """
    world = world_size(nnodes, n_gpus_per_node)
    return Topology(backend="single", world_size=world, reported_dp=fsdp_data_parallel_size(world))


def topology_of(config: Any) -> Topology:
    """The embedded topology of a resolved trainer configuration."""
    return embedded_topology(config.trainer.nnodes, config.trainer.n_gpus_per_node)


def fsdp_topology(world: int, fsdp_size: int = -1, rollout_dp: int = 1) -> Topology:
    """What the FSDP engine reports of ``world`` processes: each is a data-parallel rank, whatever ``fsdp_size`` is.

    Args:
        fsdp_size: ranks that one copy of the model is spread over; -1 for all.
        rollout_dp: rollout replicas.

    Raises:
        TopologyError: ``fsdp_size`` does not divide the world.
    """
    return Topology(
        backend="fsdp2",
        world_size=world,
        reported_dp=fsdp_data_parallel_size(world),
        fsdp_size=shard_ranks(world, fsdp_size),
        rollout_dp=rollout_dp,
    )
