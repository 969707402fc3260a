"""The synchronous GRPO trainer: one step reads top to bottom like verl's ``PPOTrainerSync``.

``fit -> step -> prepare_step, _step_once -> checkpoint -> on_step_end (weights to the rollout) -> metrics -> clear``.
Values live in the queue; what goes from stage to stage is a ``KVBatchMeta``: keys and tags. Each stage is a function
of ``lineage.trainer.stages``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from lineage import hooks
from lineage.hooks import LineageError, first_line, traced
from lineage.trainer.agent_loop import AgentLoopError, AgentLoopManager
from lineage.trainer.metrics import StepTimer, aggregate_metrics
from lineage.trainer.parts import Parts
from lineage.trainer.protocol import KVBatchMeta
from lineage.trainer.setup import build_agent_loop_manager, build_parts
from lineage.trainer.stages.advantage import compute_advantages
from lineage.trainer.stages.balance import balance_batch
from lineage.trainer.stages.checkpoint import load, save, save_is_due
from lineage.trainer.stages.fields import Metrics
from lineage.trainer.stages.log_prob import compute_old_log_prob, compute_ref_log_prob
from lineage.trainer.stages.metrics import compute_metrics
from lineage.trainer.stages.prompts import PARTITION, next_train_batch, register_prompts
from lineage.trainer.stages.reward import compute_reward_colocate
from lineage.trainer.stages.sample import sample_groups
from lineage.trainer.stages.update import update_actor
from lineage.trainer.stages.validate import validate, validation_is_due
from lineage.trainer.tracking.dump import Sample, dump_rollouts


class Tracking(Protocol):
    """Where the metrics of a step go (``loggers.Tracking``)."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take one step's metrics."""

    def log_generations(self, samples: Sequence[Sample], step: int) -> None:
        """Show some answers of a validation."""


class PPOTrainerSync:
    """Trains a policy by GRPO, rollout and update taking turns.

    Args:
        config: resolved configuration, validated.
        folder: run folder; checkpoints go there unless the configuration says otherwise.
        tracking: takes the metrics of each step.
        queue: TransferQueue's interface; None makes the in-process store.
    """

    def __init__(self, config: Any, *, folder: Path, tracking: Tracking | None = None, queue: Any = None) -> None:
        self.config = config
        self.folder = folder
        self.tracking = tracking
        self.global_steps = 0
        self.metrics: Metrics = {}
        self.timer = StepTimer()
        self._queue = queue

    # ------------------------------------------------------------------------------------------------------- init

    async def init(self) -> None:
        """Build everything, in verl's order, as step 0 of the trace."""
        self._begin(0)
        self._setup()

    @traced("init", component="PPOTrainer.init", consumer="PPOTrainer.fit")
    def _setup(self) -> None:
        """Everything of ``setup.build_parts``; the rollout then sleeps, and a run that goes on finds its place."""
        self.parts: Parts = self._build_parts()
        self.parts.replay_buffer.refill = self._add_prompts_to_generate
        self.parts.checkpoint_manager.sleep_replicas()
        self.global_steps = load(self.parts, self.folder)

    def _build_parts(self) -> Parts:
        return build_parts(self.config, self._queue)

    @traced("init", component="TaskRunner.init_agent_loop_manager", consumer="PPOTrainer.fit")
    def init_agent_loop_manager(self) -> AgentLoopManager:
        """The manager that runs the sessions, on the parts built by :meth:`init`."""
        return build_agent_loop_manager(self.config, self.parts)

    @property
    def total_training_steps(self) -> int:
        """Steps of the run."""
        return self.parts.total_training_steps

    # -------------------------------------------------------------------------------------------------------- fit

    async def fit(self, agent_loop_manager: AgentLoopManager | None = None) -> None:
        """Train until the last step; nothing is left running when it returns or raises.

        Args:
            agent_loop_manager: runs the sessions; None makes the built-in one.
        """
        self.agent_loop_manager = agent_loop_manager or self.init_agent_loop_manager()
        try:
            self.on_init_end()
            if self.config.trainer.val_before_train:
                self._log(await self._validate())
            self._seal()
            if self.config.trainer.val_only:
                return
            while self.global_steps < self.total_training_steps:
                self.global_steps += 1
                self._begin(self.global_steps)
                metrics = await self.step()
                try:
                    self._seal()
                finally:  # a step that breaks a contract still has its metrics
                    self._log(metrics)
        finally:
            await self.agent_loop_manager.cancel()

    async def step(self) -> Metrics:
        """One training step, from prompts to an empty queue; returns its metrics.

        With ``parameter_sync_step`` K, K batches are sampled and trained on before the weights go to the rollout.
        """
        self.timer, batches, made = StepTimer(), list[KVBatchMeta](), list[Metrics]()
        with self.timer("step"):
            self.prepare_step()
            for _ in range(self.config.trainer.v1.sync.parameter_sync_step):
                self.metrics = {}
                batches.append(await self._step_once(batches))
                made.append(self.metrics)
            batch = KVBatchMeta.concat(batches)
            if save_is_due(self.parts, self.global_steps):
                with self.timer("save_checkpoint"):
                    save(self.parts, self.folder, self.global_steps)
            with self.timer("update_weights"):
                self.on_step_end()
        self.metrics = aggregate_metrics(made, [part.real for part in batches])
        if validation_is_due(self.parts, self.global_steps):
            with self.timer("testing"):
                self.metrics.update(await self._validate())
        metrics = compute_metrics(self.parts, batch, self.metrics, self.timer, self.global_steps)
        if self.config.trainer.rollout_data_dir:
            self._log_rollout_data(batch)
        self._clear(batch)
        return metrics

    def prepare_step(self) -> None:
        """Submit the prompts of this step; their sessions run while the step waits for them."""
        self._add_batch_to_generate()

    async def _step_once(self, before: Sequence[KVBatchMeta] = ()) -> KVBatchMeta:
        """What happens to one batch, in the seeds' order; returns its keys and tags, padding rows included.

        Args:
            before: batches of this step that were trained on already.
        """
        parts, metrics = self.parts, self.metrics
        with self.timer("gen"):
            batch = await self._sample()
            batch.extra_info["sub_step"] = len(before)
            if not before:  # all sessions of the step have ended: the later batches lie in the queue
                self.on_sample_end()
        if parts.reward.colocated:
            with self.timer("reward"):
                await compute_reward_colocate(parts, batch)
        with self.timer("balance"):
            batch, balanced = balance_batch(parts, batch, self.global_steps)
            metrics.update(balanced)
        with self.timer("old_log_prob"):
            metrics.update(compute_old_log_prob(parts, batch))
        if parts.with_reference:
            with self.timer("ref"):
                compute_ref_log_prob(parts, batch)
        with self.timer("adv"):
            metrics.update(compute_advantages(parts, batch))
        with self.timer("update_actor"):
            metrics.update(update_actor(parts, batch, self.global_steps, before))
        return batch

    # -------------------------------------------------------------------------------------------- hooks of the mode

    def _begin(self, global_steps: int) -> None:
        """A step of the trace begins."""
        hooks.recorder().step(global_steps)

    def _seal(self) -> None:
        """It has ended."""
        hooks.recorder().seal()

    def on_init_end(self) -> None:
        """The first sync, before any request: version 0, or that of the checkpoint."""
        self.parts.checkpoint_manager.update_weights(self.global_steps)

    def on_sample_end(self) -> None:
        """Generation of the step has ended: the rollout sleeps until it has the new weights."""
        self.parts.checkpoint_manager.sleep_replicas()

    def on_step_end(self) -> None:
        """The actor's weights after this step become the rollout's version ``global_steps``."""
        self.parts.checkpoint_manager.update_weights(self.global_steps)

    def on_validate_begin(self) -> None:
        """Nothing to do: the last sync has left the rollout awake, with the weights of ``global_steps``."""

    def on_validate_end(self) -> None:
        """Nothing to do: the next step generates with the same weights, and the rollout sleeps once that is sampled."""

    # ------------------------------------------------------------------------------------------------- both ends

    def _add_batch_to_generate(self) -> None:
        self._add_prompts_to_generate(self.config.data.train_batch_size)

    def _add_prompts_to_generate(self, num_prompts: int) -> None:
        """Submit so many prompts; the replay buffer asks for more of them when it has left groups out."""
        batch = next_train_batch(self.parts, self.global_steps, num_prompts)
        register_prompts(self.parts, batch)
        # outside every stage: a task inherits the stage it is started in
        try:
            self.agent_loop_manager.generate_sequences(batch)
        except Exception as error:
            manager = type(self.agent_loop_manager)
            if manager is AgentLoopManager or isinstance(error, LineageError):
                raise
            said = f"{type(error).__name__}: {first_line(error)}"
            raise AgentLoopError(f"{manager.__name__}.generate_sequences raised {said}") from error

    async def _sample(self) -> KVBatchMeta:
        """Wait for a batch of groups and for the workers: nothing may write behind the step's back."""
        manager, several = self.agent_loop_manager, self.config.trainer.v1.sync.parameter_sync_step
        if several > 1:
            await manager.join()  # all groups are there before the first of them are taken: no race says which
        groups = self.config.data.train_batch_size // several
        batch = await sample_groups(self.parts, manager, self.global_steps, PARTITION, groups)
        self.metrics.update(self.parts.replay_buffer.metrics)
        return batch

    async def _validate(self) -> Metrics:
        self.on_validate_begin()
        metrics, samples = await validate(self.parts, self.agent_loop_manager, self.global_steps)
        self.on_validate_end()
        shown = self.config.trainer.log_val_generations
        if shown and self.tracking is not None:
            self.tracking.log_generations(samples[:shown], self.global_steps)
        return metrics

    def _log(self, metrics: Metrics) -> None:
        if self.tracking is not None:
            self.tracking.log(metrics, self.global_steps)

    @traced("dump", component="PPOTrainer._log_rollout_data")
    def _log_rollout_data(self, batch: KVBatchMeta) -> None:
        folder = Path(self.config.trainer.rollout_data_dir).expanduser()
        dump_rollouts(folder, self.global_steps, self.parts.queue, batch, self.parts.tokenizer)

    @traced("clear", component="PPOTrainer.fit")
    def _clear(self, batch: KVBatchMeta) -> None:
        """Forget every trajectory of the step; the prompt keys went when the batch was sampled."""
        self.parts.queue.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
