"""What runs inside vLLM's own workers: loading the actor's weights by name, and giving back those it computes with.

On a CPU vLLM packs the weight of a linear layer into a form of its matrix kernel and drops the original; of a tied
output layer it keeps the packed copy and forgets it in a reload. What a layer computes with is therefore asked of the
layer itself: rows of the identity come out as its weight, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

EXTENSION = f"{__name__}.WorkerExtension"
HEAD = "lm_head"
TIED = f"{HEAD}.weight"


class WorkerExtension:
    """Methods that vLLM adds to its worker (``worker_extension_cls``); the engine calls them by name."""

    model_runner: Any
    reload_weights: Any

    def lineage_load(self, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Take every tensor of the model, by the names of its checkpoint; names and shapes were checked before."""
        self.reload_weights(weights_iterator=iter(list(named_tensors)))
        repack_tied(self.model_runner.get_model())

    def lineage_resident(self) -> dict[str, Tensor]:
        """See :func:`resident`."""
        return resident(self.model_runner.get_model())


def repack_tied(model: nn.Module) -> list[str]:
    """Pack the weights again that a reload has written past their packed copy; names of their layers.

    Those are the layers with a packed copy beside a weight of their own: a reload counts a tied weight as loaded with
    the layer it came for.
    """
    repacked = []
    for name, layer in model.named_modules():
        if hasattr(layer, "cpu_linear") and layer.weight.numel():
            from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
            repacked.append(name)
    return repacked


@torch.no_grad()
def resident(model: nn.Module) -> dict[str, Tensor]:
    """The tensors the model computes with, by the names of its checkpoint, in the engine's dtype.

    Fused layers are taken apart, packed ones are read through their kernel, rows that fill a vocabulary are left out.
    """
    fused: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    found: dict[str, Tensor] = {}
    for name, layer in model.named_modules(remove_duplicate=False):  # a tied output layer may be the embedding itself
        packed = hasattr(layer, "cpu_linear") and not _looks_up(name, layer)
        for own, parameter in layer.named_parameters(recurse=False):
            tensor = _read_packed(layer) if own == "weight" and packed else parameter.data
            found.update(_by_checkpoint_name(name, own, layer, tensor, fused))
    return found


def _looks_up(name: str, layer: nn.Module) -> bool:
    """Whether rows of the weight are looked up, not multiplied by: an embedding has a packed copy all the same."""
    return type(layer).__name__ == "VocabParallelEmbedding" and not name.endswith(HEAD)


def _read_packed(layer: Any) -> Tensor:
    inputs = layer.weight.shape[-1] if layer.weight.numel() else layer.input_size_per_partition
    identity = torch.eye(inputs, dtype=layer.weight.dtype, device=layer.weight.device)
    weight: Tensor = layer.cpu_linear(identity, layer.weight, None).t().contiguous()
    return weight


def _by_checkpoint_name(
    name: str, own: str, layer: Any, tensor: Tensor, fused: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, Tensor]]:
    if hasattr(layer, "org_vocab_size"):
        tensor = tensor[: layer.org_vocab_size]
    before, _, last = name.rpartition(".")
    if last not in fused:
        yield f"{name}.{own}", tensor
        return
    parts = tensor.split(list(layer.output_partition_sizes))
    for part, piece in zip(fused[last], parts, strict=True):
        yield f"{before}.{part}.{own}", piece


def names_that_do_not_fit(
    sent: Iterable[tuple[str, Tensor]], shapes: Mapping[str, torch.Size], *, tied: bool
) -> str | None:
    """The first thing that is wrong with what was sent, in words; None where every tensor has its place.

    vLLM logs what it misses, and is broken by what it does not know: nothing may reach it before this.

    Args:
        shapes: of the engine's tensors.
        tied: the output layer has the embedding's weight, so that nobody need send it.
    """
    missing = {name for name in shapes if not (tied and name == TIED)}
    for name, tensor in sent:
        if name not in shapes or shapes[name] != tensor.shape:
            here = list(shapes[name]) if name in shapes else "no such tensor"
            return f"{name} {list(tensor.shape)} does not fit the rollout ({here})"
        missing.discard(name)
    return f"{len(missing)} tensors were not sent, first {min(missing)}" if missing else None
