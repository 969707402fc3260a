"""Faults of the version tags, of the anchor of the ratio, and of what an asynchronous run may still train on."""

from __future__ import annotations

import contextvars
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from lineage import hooks
from lineage.hooks import Weights, traced
from lineage.trainer.batching.micro_batches import MicroBatchLimit
from lineage.trainer.faults.registry import Seams, fault, trace_fault
from lineage.trainer.faults.rows import TraceRows
from lineage.trainer.protocol import nested_from_list
from lineage.trainer.rollout.base import TokenOutput
from lineage.trainer.rollout.hf import HFRollout
from lineage.trainer.training import SequenceRows, TrainingWorker
from lineage.trainer.update_plan import Place, UpdatePlan

ENGINE = "lineage.trainer.rollout.hf.HFRollout._generate"
TAG = "lineage.trainer.agent_loop.worker.trajectory_tag"


@fault("VER001", "rollout", reports=["nemo-generation-version-after-refit"])
def version_is_counted_late() -> Seams:
    """The counter moves one event after the weights do: rows are labelled with the version before."""

    def generate(original: Any, engine: HFRollout, *args: Any) -> list[TokenOutput]:
        assert engine.version is not None
        late = {"global_steps": engine.version - 1}
        return [replace(output, extra_fields=late) for output in original(engine, *args)]

    return {ENGINE: generate}


@fault("VER001", "rollout", reports=["rllm-version-stamped-at-completion"])
def newest_version_is_stamped_at_the_end() -> Seams:
    """The newest version is read when the session has ended, and is the one that will be published next."""

    def tag(original: Any, output: Any, global_steps: int) -> dict[str, Any]:
        return {**original(output, global_steps), "max_global_steps": global_steps}

    return {TAG: tag}


@fault("VER001", "rollout", reports=["rllm-version-dropped-by-gateway"])
def versions_are_lost_on_the_way() -> Seams:
    """The gateway between engine and trainer copies the fields it knows, and the versions are not among them."""

    def tag(original: Any, output: Any, global_steps: int) -> dict[str, Any]:
        return {**original(output, global_steps), "min_global_steps": None, "max_global_steps": None}

    return {TAG: tag}


@fault("VER001", "rollout", "trainer.total_training_steps=3", step=3)
def one_group_keeps_an_old_stamp() -> Seams:
    """A loop that is used again for the next prompt says the oldest version of the session before."""
    seen: list[int] = []

    def tag(original: Any, output: Any, global_steps: int) -> dict[str, Any]:
        made: dict[str, Any] = original(output, global_steps)
        if not seen:
            made["min_global_steps"] -= 1
        seen.append(global_steps)
        return made

    return {TAG: tag}


@fault("VER001", "weight_sync", reports=["prime-off-policy-counter-doubled"])
def version_counts_double() -> Seams:
    """Both the sender and the receiver count an update: the engine is two versions further after one."""

    def receive(original: Any, engine: HFRollout, named: Any, version: int) -> None:
        original(engine, named, version + 1)

    return {"lineage.trainer.rollout.hf.HFRollout.update_weights": receive}


@fault("VER001", "rollout")
def rows_are_asked_for_by_another_step() -> Seams:
    """The step of a row is taken from the counter of prompts, which runs ahead of the trainer's."""

    def tag(original: Any, output: Any, global_steps: int) -> dict[str, Any]:
        return {**original(output, global_steps), "global_steps": global_steps + 1}

    return {TAG: tag}


@fault("VER001", "weight_sync", "trainer.save_freq=1")
def checkpoint_is_never_saved() -> Seams:
    """The interval of the checkpoints is read from a section that has another name by now: none is ever saved."""
    return {"lineage.trainer.grpo.save_is_due": lambda original, *args: False}


@fault("VER003", "weight_sync")
def weights_are_synced_twice() -> Seams:
    """The step ends with a weight sync, and so does the next one's preparation: the second carries nothing new."""

    def on_step_end(original: Any, trainer: Any) -> None:
        original(trainer)
        original(trainer)

    return {"lineage.trainer.grpo.PPOTrainerSync.on_step_end": on_step_end}


@fault("VER004", "old_log_prob", reports=["trl-remainder-slices-off-policy"])
def later_mini_batches_anchor_themselves() -> Seams:
    """Old log-probs were computed for the first mini-batch only; the others take those of the policy as it then is."""

    def train(
        original: Any, worker: TrainingWorker, shares: Sequence[SequenceRows], plan: UpdatePlan, place: Place
    ) -> Any:
        if place.mini_batch == 0:
            return original(worker, shares, plan, place)
        moved, again = Weights(plan.version + 1, "actor", training=False), []
        worker.module.eval()
        for rows in shares:
            # its own forward is not recorded: a context of its own has no stage
            log_probs = contextvars.Context().run(_scored, worker, rows, plan.temperature)
            with traced("old_log_prob", component="ActorRolloutRefWorker.compute_log_prob"):
                scored = {"log_probs": nested_from_list(log_probs)}
                hooks.current().forward(scored, keys=rows.keys, span="sequence", weights=moved)
            sizes = rows.lengths("loss_mask")
            anchors = [row[-size - 1 : -1] for row, size in zip(log_probs, sizes, strict=True)]
            again.append(replace(rows, columns={**rows.columns, "old_log_probs": anchors}))
        worker.module.train()
        return original(worker, again, plan, place)

    return {"lineage.trainer.training.TrainingWorker.train_batch": train}


def _scored(worker: TrainingWorker, rows: SequenceRows, temperature: float) -> list[Tensor]:
    limit = MicroBatchLimit.of_update(worker.config)
    return worker.infer_batch(rows, micro_batches=limit, temperature=temperature, with_entropy=False).log_probs


@fault("VER004", "old_log_prob")
def anchor_has_the_next_version() -> Seams:
    """The anchor is computed by the copy of the weights that the update has already been applied to."""

    def compute(original: Any, worker: Any, batch: Any) -> None:
        worker.version += 1
        original(worker, batch)
        worker.version -= 1

    return {"lineage.trainer.actor.ActorRolloutRefWorker.compute_log_prob": compute}


@fault(
    "VER008",
    "rollout",
    reports=["verl-one-step-off-double-weight-update", "slime-aborted-samples-lack-version"],
)
def requests_cut_short_are_answers() -> Seams:
    """A second weight update aborts what is being generated; what there was so far goes on as an answer."""

    def generate(original: Any, engine: HFRollout, *args: Any) -> list[TokenOutput]:
        return [_aborted(output) for output in original(engine, *args)]

    return {ENGINE: generate}


@fault("VER008", "rollout")
def one_session_is_aborted() -> Seams:
    """One request of the batch is cut short when the engine is reclaimed, and its session counts as one that ended."""

    def generate(original: Any, engine: HFRollout, *args: Any) -> list[TokenOutput]:
        first, *others = original(engine, *args)
        return [_aborted(first), *others]

    return {ENGINE: generate}


def _aborted(output: TokenOutput) -> TokenOutput:
    return replace(output, stop_reason="abort")


# The trainer samples, updates and syncs in turn: it has no row of an older version to drop. So an asynchronous run is
# made of its rows: what it says of itself, and the versions its trajectories were generated with.


def _asynchronous(rows: TraceRows, threshold: int) -> None:
    rows.configure("trainer.v1.trainer_mode", "separate_async")
    rows.configure("trainer.v1.sampler.max_off_policy_threshold", threshold)


def _generated_by(rows: TraceRows, step: int, version: int) -> None:
    """Let everything a step says of its rows say that they began with an older version."""
    for row in rows.where(global_steps=step):
        if row["min_global_steps"] is not None:
            row["min_global_steps"] = [version] * len(row["min_global_steps"])


@trace_fault("VER005", "sample", "trainer.total_training_steps=3", step=3, reports=["prime-off-policy-off-by-one"])
def stale_by_one_too_many(rows: TraceRows) -> None:
    """The rule that drops stale rows asks for more than the limit plus one: rows just beyond it train."""
    _asynchronous(rows, threshold=1)
    _generated_by(rows, step=3, version=1)


@trace_fault("VER005", "sample", "trainer.total_training_steps=4", step=4, reports=["areal-staleness-after-recover"])
def staleness_grows_after_recovery(rows: TraceRows) -> None:
    """After a recovery accepted rows are counted from zero while the version is not: far older ones are let in."""
    _asynchronous(rows, threshold=2)
    _generated_by(rows, step=4, version=0)
