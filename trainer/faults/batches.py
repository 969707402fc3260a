"""Faults of batches, mini-batches and their dealing to ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from lineage.trainer.batching.balance import Balance
from lineage.trainer.batching.micro_batches import MicroBatchLimit, Positions
from lineage.trainer.faults.registry import Seams, fault

WORKER = "lineage.trainer.training.TrainingWorker"
MINI_BATCH_ROWS = "lineage.trainer.batching.batch_sizes.BatchSizes.mini_batch_rows"


@fault("BAT001", "update_actor", "actor_rollout_ref.actor.ppo_mini_batch_size=3")
def mini_batch_in_trajectories() -> Seams:
    """ppo_mini_batch_size is not multiplied by rollout.n: mini-batches of 3 trajectories are dealt to 2 ranks."""

    def split(original: Any, worker: Any, rows: int, plan: Any, epoch: int) -> list[list[list[int]]]:
        # the reference trainer refuses such a plan; others deal what there is
        whole = [range(rows)[start : start + plan.mini_batch_size] for start in range(0, rows, plan.mini_batch_size)]
        return [[share.tolist() for share in np.array_split(mini, worker.topology.reported_dp)] for mini in whole]

    return {
        MINI_BATCH_ROWS: lambda _, sizes: sizes.ppo_mini_batch_size,
        f"{WORKER}._mini_batches": split,
    }


@fault("BAT001", "update_actor")
def ceil_for_the_first_ranks() -> Seams:
    """A rank's share is rounded up, so that the last one is left with fewer rows than the others."""

    def deal(original: Any, rows: int, ranks: int) -> list[list[int]]:
        share = rows // ranks + 1
        return [list(range(rows))[rank * share : (rank + 1) * share] for rank in range(ranks)]

    return {"lineage.trainer.actor.deal": deal}


@fault("BAT002", "update_actor", reports=["verl-critic-mini-batch-not-times-n"])
def mini_batch_not_scaled_by_n() -> Seams:
    """ppo_mini_batch_size is taken for trajectories where it divides all the same: as many times the updates."""
    return {MINI_BATCH_ROWS: lambda _, sizes: sizes.ppo_mini_batch_size}


@fault("BAT002", "update_actor", "actor_rollout_ref.actor.ppo_epochs=2")
def epochs_do_not_reach_the_loop() -> Seams:
    """ppo_epochs stays in the configuration of the driver: the worker passes once over the batch."""

    def train(original: Any, worker: Any, rows: Any, plan: Any) -> dict[str, float]:
        return original(worker, rows, replace(plan, epochs=1))

    return {f"{WORKER}.train_mini_batch": train}


@fault("BAT002", "update_actor", reports=["openrlhf-grad-accum-floor-order"])
def optimiser_steps_once_a_micro_batch() -> Seams:
    """Gradient accumulation is counted by micro-batches: the optimiser steps once for each of them."""

    def step(original: Any, worker: Any, done: Any, *rest: Any) -> dict[str, float]:
        return [original(worker, [micro], *rest) for micro in done][-1]

    return {f"{WORKER}._optimizer_step": step}


@fault(
    "BAT003",
    "update_actor",
    "actor_rollout_ref.actor.ppo_mini_batch_size=3",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
)
def short_micro_batch_dropped() -> Seams:
    """A rank's share is cut into micro-batches of a fixed size, and the short one at its end is left out."""

    def split(original: Any, limit: MicroBatchLimit, seq_lens: Any) -> list[Positions]:
        parts = original(limit, seq_lens)
        return [[part for part in rank if len(part) == limit.rows] or rank for rank in parts] if limit.rows else parts

    return {"lineage.trainer.batching.micro_batches.MicroBatchLimit.split": split}


@fault("BAT003", "update_actor", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1")
def first_micro_batch_again() -> Seams:
    """The iterator over micro-batches is made anew for each: every one of a rank is its first."""

    def split(original: Any, limit: MicroBatchLimit, seq_lens: Any) -> list[Positions]:
        return [[rank[0]] * len(rank) if limit.rows else rank for rank in original(limit, seq_lens)]

    return {"lineage.trainer.batching.micro_batches.MicroBatchLimit.split": split}


@fault("BAT003", "old_log_prob", "+experiment=dynamic_batch")
def packed_twice() -> Seams:
    """A row that fits into two micro-batches by tokens is packed into both, and scored twice."""

    def batches(original: Any, *args: Any) -> Iterator[tuple[int, int, list[int]]]:
        first: list[int] = []
        for rank, number, places in original(*args):
            yield rank, number, [*places, *first]
            first = [] if first else places[:1]

    return {"lineage.trainer.training._inference_batches": batches}


@fault("BAT004", "balance", reports=["verl-balance-uses-world-size"])
def dealt_in_sorted_order() -> Seams:
    """The rows are sorted by length and dealt in one run to each rank: the last rank has all the long ones."""

    def balance(original: Any, seq_lens: list[int], dp_size: int) -> Balance:
        return replace(original(seq_lens, dp_size), order=sorted(range(len(seq_lens)), key=lambda row: seq_lens[row]))

    return {"lineage.trainer.stages.balance.balance_rows": balance}
