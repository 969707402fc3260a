"""A tensor that several ranks hold together, as one of them sees it; a plain tensor is whole and its own part."""

from __future__ import annotations

import math
from typing import cast

from torch import Tensor


def full(tensor: Tensor) -> Tensor:
    """The whole tensor; where it is sharded this is a collective, so all ranks must ask."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else cast(Tensor, gather())


def local(tensor: Tensor) -> Tensor:
    """The part this rank holds; it may be empty."""
    own = getattr(tensor, "to_local", None)
    return tensor if own is None else cast(Tensor, own())


def replicas(tensor: Tensor) -> int:
    """How many ranks hold each element."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return 1
    held = 1
    for dimension, placement in enumerate(tensor.placements):  # type: ignore[attr-defined]
        held *= mesh.size(dimension) if placement.is_replicate() else 1
    return held


def first_element(tensor: Tensor) -> int:
    """Place of this rank's first element in the whole tensor, flattened; a tensor is sharded by its first dimension."""
    if getattr(tensor, "device_mesh", None) is None:
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(
        tensor.shape,
        tensor.device_mesh,  # type: ignore[attr-defined]
        tensor.placements,  # type: ignore[attr-defined]
    )
    return offset[0] * math.prod(tensor.shape[1:]) if tensor.dim() else 0
