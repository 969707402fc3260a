"""The arithmetic of a batch: from prompt groups to trajectories, mini-batches and optimiser steps.

The configuration counts prompt groups: B ``data.train_batch_size``, M ``actor.ppo_mini_batch_size``. Rollout makes G
(``rollout.n``) trajectories of each, and the actor sees trajectories alone. With K = ``parameter_sync_step`` the step's
B groups are sampled and trained on in K parts. The formulas are the seeds': exact where every session has one output
and succeeds; a batch of other size is padded to the next whole mini-batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BatchSizes:
    """Sizes that follow from the configuration.

    Attributes:
        train_batch_size: B, prompt groups a step.
        ppo_mini_batch_size: M, prompt groups a mini-batch.
        n: G, sessions a group.
        ppo_epochs: E, passes over a batch.
        parameter_sync_step: K, batches a step is sampled in.
        dp_size: data-parallel size the engine reports.
    """

    train_batch_size: int
    ppo_mini_batch_size: int
    n: int
    ppo_epochs: int = 1
    parameter_sync_step: int = 1
    dp_size: int = 1

    @classmethod
    def of(cls, config: Any, dp_size: int = 1) -> BatchSizes:
        """Sizes of a whole configuration."""
        actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        return cls(
            train_batch_size=config.data.train_batch_size,
            ppo_mini_batch_size=actor.ppo_mini_batch_size,
            n=rollout.n,
            ppo_epochs=actor.ppo_epochs,
            parameter_sync_step=config.trainer.v1.sync.parameter_sync_step,
            dp_size=dp_size,
        )

    @property
    def groups(self) -> int:
        """B / K: prompt groups sampled at once."""
        return self.train_batch_size // self.parameter_sync_step

    @property
    def trajectories(self) -> int:
        """B / K x G: trajectories of one batch."""
        return self.groups * self.n

    @property
    def mini_batch_rows(self) -> int:
        """M x G: trajectories of a mini-batch over all ranks."""
        return self.ppo_mini_batch_size * self.n

    @property
    def required_multiple(self) -> int:
        """Rows a batch must be a multiple of (verl ``_get_required_batch_multiple``; there is no critic)."""
        return math.lcm(self.dp_size, self.mini_batch_rows)

    def missing(self, rows: int) -> int:
        """Padding rows that bring ``rows`` up to the next multiple."""
        return -rows % self.required_multiple

    def mini_batches(self, rows: int) -> int:
        """Mini-batches an epoch of a batch of ``rows``, padding included: B / K / M where nothing is padded."""
        return (rows + self.missing(rows)) // self.mini_batch_rows

    def updates(self, rows: int) -> int:
        """Optimiser steps on a batch of ``rows``: E x B / K / M where nothing is padded."""
        return self.ppo_epochs * self.mini_batches(rows)
