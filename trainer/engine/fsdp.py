"""FSDP2: a model whose parameters, gradients and optimiser state are spread over the ranks (torch ``fully_shard``).

Every decoder layer is a unit, and what is left of the model another: embeddings, the last norm and the head, tied or
not. Gradients are *summed* over the ranks: a term of the loss is already divided by the denominator of the whole
mini-batch, whichever rank it is on.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from lineage.hooks import UserError
from lineage.trainer.engine.topology import shard_ranks

#: dimensions of the mesh: copies of the model, and the ranks that one copy is spread over
REPLICATE, SHARD = "ddp", "fsdp"


class FSDPError(UserError):
    """A model that cannot be sharded as asked."""


def device_mesh(world_size: int, fsdp_size: int = -1, device: str = "cpu") -> DeviceMesh:
    """The ranks in one row, or copies by shards (HSDP); every rank must ask.

    Args:
        world_size: ranks of the process group.
        fsdp_size: ranks that one copy of the model is spread over; -1 takes all.
        device: type of the model's device.
    """
    each = shard_ranks(world_size, fsdp_size)
    kind = device.partition(":")[0]
    if each == world_size:
        return init_device_mesh(kind, (world_size,), mesh_dim_names=(SHARD,))
    return init_device_mesh(kind, (world_size // each, each), mesh_dim_names=(REPLICATE, SHARD))


def shard(module: nn.Module, mesh: DeviceMesh, *, reshard_after_forward: bool = True, offload: bool = False) -> None:
    """Spread a model over the ranks of a mesh, in place; all of them hold the same weights before.

    Args:
        module: a causal language model, with an adapter or without.
        reshard_after_forward: give up the other ranks' parts of a unit after its forward pass, and gather them again
            for the backward pass.
        offload: keep the own parts in the memory of the host (``param_offload``).

    Raises:
        FSDPError: a weight is tied over two units, which would make it two.
    """
    tied = _tied(module)
    policy: OffloadPolicy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": reshard_after_forward,
        "offload_policy": policy,
    }
    for layer in decoder_layers(module):
        fully_shard(layer, **options)
    fully_shard(module, **options)
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no other
    for names in tied - _tied(module):
        raise FSDPError(
            f"{' and '.join(names)} are one tied weight, which sharding by layers would make two: "
            "take a model that ties none but its embeddings, or mode=embedded"
        )


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """The layers that transformers says are not to be split, in order; none where it says nothing."""
    names = {name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    return [part for part in module.modules() if type(part).__name__ in names]


def _tied(module: nn.Module) -> set[tuple[str, ...]]:
    """Names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {tuple(several) for several in names.values() if len(several) > 1}
