"""How one update walks over its batch, and the places it passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lineage.trainer.batching.micro_batches import MicroBatchLimit


@dataclass(frozen=True)
class UpdatePlan:
    """How one ``update_actor`` walks over its batch (the batch's ``extra_info``).

    Attributes:
        mini_batch_size: rows of a mini-batch over all ranks: M x G.
        micro_batches: what one forward pass holds.
        epochs: passes over the batch.
        temperature: the sampler's.
        shuffle_seed: seed of the order of rows inside each rank, None keeps the order.
        version: version of the weights before the training step.
        first_update: optimiser steps that came before in the training step.
        attrs: what the trace rows of the update say of it.
    """

    mini_batch_size: int
    micro_batches: MicroBatchLimit
    epochs: int
    temperature: float
    shuffle_seed: int | None
    version: int
    first_update: int = 0
    attrs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Where in the update a mini-batch or micro-batch stands."""

    ppo_epoch: int
    mini_batch: int
    update_index: int

    def context(self) -> dict[str, int]:
        """As context columns of a trace row."""
        return {"ppo_epoch": self.ppo_epoch, "mini_batch": self.mini_batch, "update_index": self.update_index}
