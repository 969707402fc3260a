"""The model under training as the other roles see it: what the rollout gets of it, and what the reference is.

Without an adapter that is the model itself and a frozen copy of it; ``lora`` has the other answer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor, nn

from lineage.trainer.engine.sharded import full


class ReferencePolicy(Protocol):
    """A policy that never trains, against which the KL is measured."""

    @property
    def training(self) -> bool:
        """True when its module is in training mode, which it should not be."""

    def scoring(self) -> AbstractContextManager[nn.Module]:
        """The module to score with, inside a ``with`` block."""

    def state_dict(self) -> dict[str, Tensor]:
        """Its tensors as they are held, sharded or whole, by the names of the model that was loaded."""


class FrozenCopy:
    """A second model with the first weights of the actor (verl ``compute_ref_log_prob``)."""

    def __init__(self, module: nn.Module) -> None:
        self.module = copy.deepcopy(module).eval().requires_grad_(False)

    @property
    def training(self) -> bool:
        """False, as long as nobody puts it in training mode."""
        return self.module.training

    def scoring(self) -> AbstractContextManager[nn.Module]:
        """The copy."""
        return nullcontext(self.module)

    def state_dict(self) -> dict[str, Tensor]:
        """The copy's tensors."""
        return dict(self.module.state_dict())


class Policy:
    """A model every weight of which trains.

    Attributes:
        module: what is trained, saved and restored.
        adapter: name of the active adapter; None without one.
    """

    adapter: str | None = None

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What the policy computes with, tied tensors and buffers included, whole and detached.

        Where the module is sharded each is a collective: every rank takes all of them.
        """
        for name, tensor in self.module.state_dict().items():
            yield name, full(tensor.detach())

    def names(self) -> list[str]:
        """Names of :meth:`tensors`, in order; no tensor is gathered for them."""
        return list(self.module.state_dict())

    def parameters(self) -> dict[str, bool]:
        """Which of :meth:`tensors` are parameters, and whether each trains; buffers are left out."""
        named = self.module.state_dict(keep_vars=True).items()
        return {name: tensor.requires_grad for name, tensor in named if isinstance(tensor, nn.Parameter)}

    def resident_copy(self) -> nn.Module:
        """A separate model that takes :meth:`tensors` by name, for the rollout: no storage is shared.

        Of a module that is not sharded yet.
        """
        return copy.deepcopy(self.module)

    def reference(self) -> ReferencePolicy:
        """The reference of this policy, taken before it trains and before its module is sharded."""
        return FrozenCopy(self.module)


def make_policy(module: nn.Module, config: Any) -> Policy:
    """The policy of ``actor_rollout_ref.model``: the module itself, or with a LoRA adapter on it.

    Raises:
        AdapterError: the adapter does not fit the module.
    """
    if not config.lora_rank:
        return Policy(module)
    from lineage.trainer.lora import LoraPolicy  # half a second of imports, for those who want it

    return LoraPolicy(module, config)
