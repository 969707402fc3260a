"""Faults of parallel topology."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lineage import hooks
from lineage.trainer.faults.registry import Seams, fault


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
