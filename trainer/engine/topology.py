"""Logical data-parallel size of the actor, as pure functions of the parallel sizes.

The seeds' rule ("Training backend 中的 batch mapping"): FSDP divides the world by Ulysses SP whatever ``fsdp_size`` is;
Megatron by TP x PP x CP, whatever EP is; under dynamic context parallel it is 1. The rollout's tensor parallelism says
how replicas occupy devices and never enters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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


def fsdp_topology(
    world: int, fsdp_size: int = -1, rollout_dp: int = 1, *, sp: int = 1, rollout_tp: int = 1
) -> Topology:
    """What the FSDP engine reports of ``world`` processes: ``sp`` of them a replica, whatever ``fsdp_size`` is.

    Args:
        fsdp_size: ranks that one copy of the model is spread over; -1 for all.
        rollout_dp: rollout replicas.
        sp: ``ulysses_sequence_parallel_size``, ranks that share the sequences of one replica.
        rollout_tp: ranks of one rollout replica.

    Raises:
        TopologyError: ``fsdp_size`` or ``sp`` does not divide the world.
    """
    return Topology(
        backend="fsdp2",
        world_size=world,
        reported_dp=fsdp_data_parallel_size(world, sp),
        fsdp_size=shard_ranks(world, fsdp_size),
        sp=sp,
        rollout_tp=rollout_tp,
        rollout_dp=rollout_dp,
    )


@dataclass(frozen=True)
class MegatronLayout:
    """Where Megatron places ``world`` ranks, in its order ``tp-cp-ep-dp-pp``: tensor parallel ranks are neighbours.

    Dense layers know TP, CP, DP and PP. Expert layers divide the same ranks anew, by ETP, EP and expert DP inside each
    pipeline stage; so EP changes which ranks share experts, and never how the batch is dealt.

    Attributes:
        world: ranks of the training job.
        tp, pp, cp, ep: tensor, pipeline, context and expert parallel sizes.
        etp: tensor parallel size of the experts; None takes ``tp``, as Megatron does.
        dynamic_cp: context parallel sizes change from batch to batch.

    Raises:
        TopologyError: a size is below 1, or the sizes do not divide the world.
    """

    world: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    dynamic_cp: bool = False

    def __post_init__(self) -> None:
        tp, pp, etp = self.tp, self.pp, self.expert_tp
        self._divide(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, context_parallel_size=self.cp)
        self._divide(
            expert_tensor_parallel_size=etp, expert_model_parallel_size=self.ep, pipeline_model_parallel_size=pp
        )

    def _divide(self, **sizes: int) -> None:
        product = math.prod(sizes.values())
        if min(self.world, *sizes.values()) < 1 or self.world % product:
            named = " x ".join(f"{name}={size}" for name, size in sizes.items())
            raise TopologyError(
                f"world size {self.world} does not divide by {named}: choose sizes whose product divides it"
            )

    @property
    def expert_tp(self) -> int:
        """Ranks that one expert's tensors are split over."""
        return self.tp if self.etp is None else self.etp

    @property
    def process_groups_dp(self) -> int:
        """Size of the process group that dense gradients of one context part are summed over: the static formula."""
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def data_parallel_size(self) -> int:
        """Parts a batch is dealt in: ``world / (TP x PP x CP)``; 1 under dynamic context parallel, as verl reports."""
        return 1 if self.dynamic_cp else self.process_groups_dp

    @property
    def expert_data_parallel_size(self) -> int:
        """Copies of each expert: ``world / (ETP x EP x PP)``."""
        return self.world // (self.expert_tp * self.ep * self.pp)

    def coord(self, rank: int) -> dict[str, int]:
        """Place of a rank by dimension, that of a trace row, with ``ep`` as the experts have it.

        Under dynamic context parallel the ranks of DP share sequences out as those of CP do: ``dp`` is 0 everywhere,
        and ``cp`` counts both.
        """
        place, rest = {}, rank
        for name, size in {"tp": self.tp, "cp": self.cp, "dp": self.process_groups_dp, "pp": self.pp}.items():
            rest, place[name] = divmod(rest, size)
        if self.dynamic_cp:
            place |= {"cp": place["cp"] + self.cp * place["dp"], "dp": 0}
        return {**place, "ep": rank // self.expert_tp % self.ep}

    def data_parallel_groups(self) -> list[list[int]]:
        """Ranks of each dense data-parallel process group: equal in every place but DP's; by their first rank."""
        stride = self.tp * self.cp
        return [
            [start + stride * dp for dp in range(self.process_groups_dp)]
            for start in self._starts(stride, self.process_groups_dp)
        ]

    def expert_data_parallel_groups(self) -> list[list[int]]:
        """Ranks that hold the same part of the same experts; by their first rank."""
        stride, size = self.expert_tp * self.ep, self.expert_data_parallel_size
        return [[start + stride * dp for dp in range(size)] for start in self._starts(stride, size)]

    def _starts(self, stride: int, size: int) -> list[int]:
        """First rank of each group of ``size`` ranks that stand ``stride`` apart: stages are ``stride x size`` long."""
        return [stage + offset for stage in range(0, self.world, stride * size) for offset in range(stride)]

    def replicas(self) -> list[list[int]]:
        """Ranks that see the same rows, for each part of the batch; each rank is in one."""
        places: list[list[int]] = [[] for _ in range(self.data_parallel_size)]
        for rank in range(self.world):
            places[self.coord(rank)["dp"]].append(rank)
        return places

    def topology(self, rollout_tp: int = 1, rollout_dp: int = 1) -> Topology:
        """What such an engine reports, the rollout's sizes apart from its own."""
        return Topology(
            backend="megatron",
            world_size=self.world,
            reported_dp=self.data_parallel_size,
            tp=self.tp,
            pp=self.pp,
            cp=self.cp,
            ep=self.ep,
            dynamic_cp=self.dynamic_cp,
            rollout_tp=rollout_tp,
            rollout_dp=rollout_dp,
        )
