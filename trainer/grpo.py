"""The synchronous GRPO trainer: one step reads top to bottom like verl's ``PPOTrainerSync``.

``fit -> step -> prepare_step, _step_once -> checkpoint -> on_step_end (weights to the rollout) -> metrics -> clear``.
Values live in the queue; what goes from stage to stage is a ``KVBatchMeta``: keys and tags.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tensordict import TensorDict
from torch import Tensor

from lineage import hooks
from lineage.hooks import traced
from lineage.trainer.actor import fetch
from lineage.trainer.advantage import compute_advantage
from lineage.trainer.agent_loop import AgentLoopManager
from lineage.trainer.balance import balance_rows
from lineage.trainer.checkpoint import save_checkpoint
from lineage.trainer.dump import dump_rollouts
from lineage.trainer.metrics import (
    DataRows,
    StepTimer,
    balance_metrics,
    compute_data_metrics,
    compute_rollout_metrics,
    compute_throughput_metrics,
)
from lineage.trainer.padding import missing_rows, padding_fields, padding_rows, required_multiple
from lineage.trainer.prompts import PromptStream
from lineage.trainer.protocol import DataProto, KVBatchMeta, lengths_of, response_window
from lineage.trainer.replay_buffer import ReplayBufferError
from lineage.trainer.rollout.base import SamplingParams
from lineage.trainer.setup import Parts, build_agent_loop_manager, build_parts
from lineage.trainer.training import rows_of

PARTITION = "train"
Metrics = dict[str, float]


class Tracking(Protocol):
    """Where the metrics of a step go (``loggers.Tracking``)."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take one step's metrics."""


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
        self.rollout_config = config.actor_rollout_ref.rollout

    # ------------------------------------------------------------------------------------------------------- init

    async def init(self) -> None:
        """Build everything, in verl's order, as step 0 of the trace."""
        hooks.recorder().step(0)
        self._setup()

    @traced("init", component="PPOTrainer.init", consumer="PPOTrainer.fit")
    def _setup(self) -> None:
        """Tokenizer, dataloader, workers, reward loop, rollout, weight sync; the rollout then sleeps."""
        self.parts: Parts = build_parts(self.config, self._queue)
        self.queue = self.parts.queue
        self.worker = self.parts.worker
        self.stream: PromptStream = self.parts.stream
        self.replay_buffer = self.parts.replay_buffer
        self.checkpoint_manager = self.parts.checkpoint_manager
        self.checkpoint_manager.sleep_replicas()

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
            hooks.recorder().seal()
            while self.global_steps < self.total_training_steps:
                self.global_steps += 1
                hooks.recorder().step(self.global_steps)
                metrics = await self.step()
                try:
                    hooks.recorder().seal()
                finally:  # a step that breaks a contract still has its metrics
                    if self.tracking is not None:
                        self.tracking.log(metrics, self.global_steps)
        finally:
            await self.agent_loop_manager.cancel()

    async def step(self) -> Metrics:
        """One training step, from prompts to an empty queue; returns its metrics."""
        self.metrics, self.timer = {}, StepTimer()
        with self.timer("step"):
            self.prepare_step()
            batch = await self._step_once()
            if self._save_is_due():
                with self.timer("save_checkpoint"):
                    self._save_checkpoint()
            with self.timer("update_weights"):
                self.on_step_end()
        self._compute_metrics(batch)
        if self.config.trainer.rollout_data_dir:
            self._log_rollout_data(batch)
        self._clear(batch)
        return self.metrics

    def prepare_step(self) -> None:
        """Submit the prompts of this step; their sessions run while the step waits for them."""
        self._add_batch_to_generate()

    async def _step_once(self) -> KVBatchMeta:
        """What happens to one batch, in the seeds' order; returns its keys and tags, padding rows included."""
        with self.timer("gen"):
            batch = await self._sample()
            self.on_sample_end()
        with self.timer("balance"):
            batch = self._balance_batch(batch)
        with self.timer("old_log_prob"):
            self._compute_old_log_prob(batch)
        if self.parts.with_reference:
            with self.timer("ref"):
                self._compute_ref_log_prob(batch)
        with self.timer("adv"):
            self._compute_advantage(batch)
        with self.timer("update_actor"):
            self._update_actor(batch)
        return batch

    # -------------------------------------------------------------------------------------------- hooks of the mode

    def on_init_end(self) -> None:
        """The first sync: version 0 goes to the rollout before any request."""
        self.checkpoint_manager.update_weights(0)

    def on_sample_end(self) -> None:
        """Generation of the step has ended: the rollout sleeps until it has the new weights."""
        self.checkpoint_manager.sleep_replicas()

    def on_step_end(self) -> None:
        """The actor's weights after this step become the rollout's version ``global_steps``."""
        self.checkpoint_manager.update_weights(self.global_steps)

    # ------------------------------------------------------------------------------------------------------ prompts

    def _add_batch_to_generate(self) -> None:
        batch = self._next_train_batch()
        self._submit_batch_to_rollout(batch)
        # outside every stage: a task inherits the stage it is started in
        self.agent_loop_manager.generate_sequences(batch)

    @traced("dataset", component="RLHFDataset.__getitem__", consumer="PPOTrainer._add_batch_to_generate")
    def _next_train_batch(self) -> DataProto:
        """The next prompts of the dataset, each with its uid."""
        batch = self.stream.next_batch()
        columns = batch.non_tensor_batch
        indexes = [int(index) for index in columns["index"]]
        names = ("raw_prompt", "data_source", "reward_model", "extra_info", "index")
        rows: dict[str, Any] = {name: list(columns[name]) for name in names if name in columns}
        rows.update(batch.batch.items())
        hooks.current().produce(
            rows,
            keys=[str(index) for index in indexes],
            entity="dataset_row",
            columns={"source_index": indexes, "data_source": [str(source) for source in columns["data_source"]]},
        )
        batch.meta_info = {
            "global_steps": self.global_steps,
            "partition_id": PARTITION,
            "expected": self.rollout_config.n,
            "sampling_params": self._sampling_params(),
        }
        return batch

    @traced("prompt", component="PPOTrainer._submit_batch_to_rollout", consumer="AgentLoopWorker.run")
    def _submit_batch_to_rollout(self, batch: DataProto) -> None:
        """Register each uid as a pending prompt."""
        columns = batch.non_tensor_batch
        uids = [str(uid) for uid in columns["uid"]]
        expected = [self.rollout_config.n] * len(uids)
        hooks.current().produce(
            {"uid": uids},
            keys=uids,
            entity="prompt",
            columns={
                "source_index": [int(index) for index in columns["index"]],
                "data_source": [str(source) for source in columns["data_source"]],
                "expected": expected,
            },
        )
        tag = {"is_prompt": True, "status": "pending", "global_steps": self.global_steps}
        tags = [{**tag, "expected": sessions} for sessions in expected]
        self.queue.kv_batch_put(keys=uids, partition_id=PARTITION, tags=tags)

    def _sampling_params(self) -> SamplingParams:
        rollout = self.rollout_config
        return SamplingParams(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            do_sample=rollout.do_sample,
            ignore_eos=rollout.ignore_eos,
            logprobs_mode=rollout.logprobs_mode,
            seed=self.config.trainer.seed,
        )

    # ------------------------------------------------------------------------------------------------------- stages

    async def _sample(self) -> KVBatchMeta:
        """Wait for the step's groups, then for the workers: nothing may write behind the step's back."""
        manager = self.agent_loop_manager
        try:
            batch = await self.replay_buffer.sample(
                self.global_steps,
                PARTITION,
                self.config.data.train_batch_size,
                still_running=lambda: manager.running,
            )
        except ReplayBufferError:
            await manager.join()  # a worker's own error says more than the batch it spoilt
            raise
        await manager.join()
        return batch

    @traced("balance", component="PPOTrainer._balance_batch", consumer="ActorRolloutRefWorker")
    def _balance_batch(self, batch: KVBatchMeta) -> KVBatchMeta:
        """Pad the batch so that it divides, then deal rows of like work to the data-parallel ranks."""
        ranks = self.worker.get_data_parallel_size()
        missing = missing_rows(len(batch), required_multiple(self._mini_batch_rows, ranks))
        if missing:
            batch = self._add_padding(batch, missing)
        seq_lens = [tag["seq_len"] for tag in batch.tags]
        balance = balance_rows(seq_lens, ranks if self.config.trainer.balance_batch else 1)
        batch.reorder(balance.order)
        hooks.current().reorder(batch.keys, source_index=balance.order, tags=batch.tags)
        real = [tag["seq_len"] for tag in batch.tags if not tag["is_padding"]]
        self.metrics.update(balance_metrics(balance.loads_before, balance.loads_after, real))
        return batch

    def _add_padding(self, batch: KVBatchMeta, count: int) -> KVBatchMeta:
        like = self.queue.kv_batch_get(keys=batch.keys[:1], partition_id=batch.partition_id)
        rows = padding_rows(count, batch.tags[0], seed=self.config.trainer.seed, global_steps=self.global_steps)
        fields = padding_fields(like, rows, self.parts.eos_token_ids[0])
        self.queue.kv_batch_put(keys=rows.keys, partition_id=batch.partition_id, fields=fields, tags=rows.tags)
        hooks.current().keys("pad", rows.keys, columns={"is_padding": [True] * count})
        return KVBatchMeta(
            batch.keys + rows.keys, batch.tags + rows.tags, batch.partition_id, extra_info=batch.extra_info
        )

    @traced("old_log_prob", component="PPOTrainer._compute_old_log_prob", consumer="PPOTrainer._compute_advantage")
    def _compute_old_log_prob(self, batch: KVBatchMeta) -> None:
        """The actor scores the batch; its values cut to the response become ``old_log_probs`` and ``entropy``."""
        self.worker.compute_log_prob(batch)
        sampled = ["rollout_log_probs"] if self.rollout_config.calculate_log_probs else []
        data = fetch(self.queue, batch, ["log_probs", "entropy", "response_mask", *sampled])
        mask = data["response_mask"]
        old_log_probs = self._response_part(data["log_probs"], mask)
        entropy = self._response_part(data["entropy"], mask)
        self._put(batch, {"old_log_probs": old_log_probs, "entropy": entropy})
        keep = mask.values().bool()
        self.metrics["actor/entropy"] = float(entropy.values()[keep].double().mean()) if keep.any() else 0.0
        if sampled:
            rollout = data["rollout_log_probs"]
            hooks.current().compare(
                "old_log_probs", old_log_probs, "rollout_log_probs", rollout, mask=mask, keys=batch.keys
            )
            self.metrics.update(compute_rollout_metrics(old_log_probs.values(), rollout.values(), mask.values()))

    @traced("ref_log_prob", component="PPOTrainer._compute_ref_log_prob", consumer="PPOTrainer._compute_advantage")
    def _compute_ref_log_prob(self, batch: KVBatchMeta) -> None:
        """The frozen reference scores the batch; cut to the response it becomes ``ref_log_prob``."""
        self.worker.compute_ref_log_prob(batch)
        data = fetch(self.queue, batch, ["log_probs", "response_mask", "old_log_probs"])
        mask = data["response_mask"]
        ref_log_prob = self._response_part(data["log_probs"], mask)
        self._put(batch, {"ref_log_prob": ref_log_prob})
        hooks.current().compare(
            "ref_log_prob", ref_log_prob, "old_log_probs", data["old_log_probs"], mask=mask, keys=batch.keys
        )

    @traced("advantage", component="PPOTrainer._compute_advantage", consumer="ActorRolloutRefWorker.update_actor")
    def _compute_advantage(self, batch: KVBatchMeta) -> None:
        """Group-relative advantages in padded form, written back jagged."""
        names = ["uid", "response_mask", "rm_scores", "old_log_probs"]
        names += ["rollout_log_probs"] if self.rollout_config.calculate_log_probs else []
        names += ["ref_log_prob"] if self.parts.with_reference else []
        nested = fetch(self.queue, batch, names)
        lengths = lengths_of(nested["response_mask"])
        stage, spans = hooks.current(), {"response": lengths.tolist()}
        data = DataProto.from_tensordict(nested)
        stage.pad(data, keys=batch.keys, lengths=spans)
        mask = data.batch["response_mask"]
        # use_kl_in_reward would take the KL penalty off here; without it the rewards are the scores
        scores = data.batch["rm_scores"]
        result = compute_advantage(
            scores,
            mask,
            batch.keys,
            uids=data.non_tensor_batch["uid"].tolist(),
            is_padding=[tag["is_padding"] for tag in batch.tags],
            norm_by_std=self.config.algorithm.norm_adv_by_std_in_grpo,
        )
        made = {
            "token_level_scores": scores,
            "token_level_rewards": scores,
            "advantages": result.advantages,
            "returns": result.returns,
        }
        stage.forward(made, keys=batch.keys, mask=mask, lengths=spans)
        data.batch.update({"advantages": result.advantages, "returns": result.returns})
        fields = data.to_nested(["advantages", "returns"], lengths)
        stage.unpad(fields, keys=batch.keys, mask=nested["response_mask"])
        self._put(batch, dict(fields.items()))

    def _update_actor(self, batch: KVBatchMeta) -> None:
        """Hand the batch to the actor with the plan of its update."""
        actor, seed = self.config.actor_rollout_ref.actor, self.config.trainer.seed
        data_seed = seed if actor.data_loader_seed is None else actor.data_loader_seed
        batch.extra_info.update(
            global_steps=self.global_steps,
            mini_batch_size=self._mini_batch_rows,
            epochs=actor.ppo_epochs,
            temperature=self.rollout_config.temperature,
            shuffle_seed=data_seed * 100_003 + self.global_steps if actor.shuffle else None,
        )
        self.metrics.update(self.worker.update_actor(batch))

    # ------------------------------------------------------------------------------------------------ after the update

    def _save_is_due(self) -> bool:
        every = self.config.trainer.save_freq
        return every > 0 and (self.global_steps % every == 0 or self.global_steps == self.total_training_steps)

    @traced("checkpoint", component="PPOTrainer._save_checkpoint")
    def _save_checkpoint(self) -> None:
        trainer = self.config.trainer
        folder = Path(trainer.default_local_dir or self.folder / "checkpoints")
        actor = self.worker.actor
        save_checkpoint(folder, self.global_steps, actor, self.stream.state_dict(), keep=trainer.max_actor_ckpt_to_keep)
        weights = hooks.Weights(self.worker.version, "actor", training=actor.module.training)
        hooks.current().params("produce", dict(self.worker.state_dict()), field="checkpoint", weights=weights)

    @traced("metrics", component="PPOTrainer._compute_metrics")
    def _compute_metrics(self, batch: KVBatchMeta) -> None:
        """Data, throughput and time, over real rows."""
        names = ["advantages", "num_turns", "prompts", "response_mask", "responses", "returns", "rm_scores"]
        data = fetch(self.queue, batch, names)
        real = [row for row, tag in enumerate(batch.tags) if not tag["is_padding"]]

        def rows(name: str) -> list[Tensor]:
            column = rows_of(data[name])
            return [column[row] for row in real]

        seconds = self.timer.seconds.get("step", 0.0)
        tokens = sum(batch.tags[row]["seq_len"] for row in real)
        self.metrics.update(
            compute_data_metrics(
                DataRows(
                    rm_scores=rows("rm_scores"),
                    token_level_rewards=rows("rm_scores"),
                    advantages=rows("advantages"),
                    returns=rows("returns"),
                    response_mask=rows("response_mask"),
                    prompt_lens=lengths_of(data["prompts"])[real],
                    num_turns=data["num_turns"][real],
                    clipped_at=self.parts.response_length,
                    prompts_clipped_at=self.parts.prompt_length,
                )
            )
        )
        self.metrics.update(compute_throughput_metrics(tokens, seconds, self.worker.get_data_parallel_size()))
        self.metrics.update(self.timer.metrics())
        self.metrics["training/global_step"] = float(self.global_steps)
        self.metrics["training/epoch"] = float(self.stream.epoch)
        hooks.current().metrics(self.metrics, attrs={"over": f"{len(batch)},{len(real)}"})

    @traced("dump", component="PPOTrainer._log_rollout_data")
    def _log_rollout_data(self, batch: KVBatchMeta) -> None:
        folder = Path(self.config.trainer.rollout_data_dir)
        dump_rollouts(folder, self.global_steps, self.queue, batch, self.parts.tokenizer)

    @traced("clear", component="PPOTrainer.fit")
    def _clear(self, batch: KVBatchMeta) -> None:
        """Forget every trajectory of the step; the prompt keys went when the batch was sampled."""
        self.queue.kv_clear(keys=batch.keys, partition_id=batch.partition_id)

    # ----------------------------------------------------------------------------------------------------- shorthand

    @property
    def _mini_batch_rows(self) -> int:
        """M x G: rows of a PPO mini-batch over all ranks."""
        return self.config.actor_rollout_ref.actor.ppo_mini_batch_size * self.rollout_config.n

    @staticmethod
    def _response_part(values: Tensor, response_mask: Tensor) -> Tensor:
        """Full-sequence jagged values cut to the response, whose length is the mask's."""
        seq_lens, response_lens = lengths_of(values), lengths_of(response_mask)
        return response_window(values, seq_lens - response_lens, seq_lens)

    def _put(self, batch: KVBatchMeta, columns: dict[str, Tensor]) -> None:
        fields = TensorDict(columns, batch_size=[len(batch)])
        self.queue.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
