"""Faults of parallel topology."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lineage import hooks
from lineage.trainer.faults.registry import Seams, fault

MINI_BATCHES = "lineage.trainer.training.TrainingWorker._mini_batches"


@fault("TOP001", "init", "trainer.n_gpus_per_node=4", "rollout.tensor_model_parallel_size=2", step=0)
def dp_of_the_rollout() -> Seams:
    """The actor's data-parallel size is taken for world / rollout TP."""

    def report(original: Any, config: Any) -> hooks.Topology:
        topology, tp = original(config), config.actor_rollout_ref.rollout.tensor_model_parallel_size
        dp = topology.world_size // tp
        return replace(topology, reported_dp=dp, rollout_tp=tp, rollout_dp=dp)

    return {"lineage.trainer.setup.topology_of": report}


@fault("TOP003", "init", "rollout.tensor_model_parallel_size=2", step=0)
def one_topology_for_both() -> Seams:
    """One set of parallel sizes is reported for both engines: FSDP is given the rollout's tensor parallelism."""

    def report(original: Any, config: Any) -> hooks.Topology:
        tp = config.actor_rollout_ref.rollout.tensor_model_parallel_size
        return replace(original(config), backend=config.actor_rollout_ref.actor.strategy, tp=tp, rollout_tp=tp)

    return {"lineage.trainer.setup.topology_of": report}


@fault("TOP001", "update_actor")
def split_for_one_rank() -> Seams:
    """The split asks the driver's own process group for the data-parallel size, and that group has one rank."""

    def split(original: Any, *args: Any) -> list[list[list[int]]]:
        return [[[row for share in shares for row in share]] for shares in original(*args)]

    return {MINI_BATCHES: split}


@fault("TOP002", "update_actor")
def first_part_for_every_rank() -> Seams:
    """The rank's index in its own group is taken for that in the data-parallel group: all ranks get the first part."""

    def deal(original: Any, rows: int, ranks: int) -> list[list[int]]:
        return [original(rows, ranks)[0]] * ranks

    return {"lineage.trainer.actor.deal": deal}


@fault("TOP002", "update_actor")
def ranks_slice_by_the_first_rank() -> Seams:
    """The ranks hold their own parts and cut mini-batches out of the batch by the first rank's positions."""

    def split(original: Any, *args: Any) -> list[list[list[int]]]:
        return [[shares[0] for _ in shares] for shares in original(*args)]

    return {MINI_BATCHES: split}


@fault("TOP002", "update_actor")
def ranks_in_another_order() -> Seams:
    """The mini-batches are dealt by the ranks of the world, counted from the other end: each rank trains on rows that
    another was handed."""

    def split(original: Any, *args: Any) -> list[list[list[int]]]:
        return [shares[::-1] for shares in original(*args)]

    return {MINI_BATCHES: split}
