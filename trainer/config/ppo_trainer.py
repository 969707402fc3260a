"""The root of the configuration, verl's ``ppo_trainer``: data, actor_rollout_ref, algorithm, reward, trainer, trace."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lineage.trainer.config.actor_rollout_ref import ON_RAY, ActorRolloutRefConfig, on_ray, unused


@dataclass
class DataConfig:
    """``data``: prompts in.

    Attributes:
        train_files: parquet, json or jsonl file(s), ``reasoning_gym:<task>`` or ``builtin:<task>``.
        train_batch_size: B, prompt groups a step.
        gen_batch_size: prompts a fetch of the dataloader; null takes ``train_batch_size``. It is 1, whatever is set,
            where groups are replaced (``filter_groups``, ``sync_refill_failed_groups``).
        val_files: prompts of the validation, as ``train_files``; null has none.
        val_batch_size: validation prompts generated together; null takes all.
        max_prompt_length: tokens of a prompt after the chat template.
        max_response_length: tokens of a response.
        filter_overlong_prompts: leave rows with longer prompts out.
        truncation: what to do with one that is left: ``error left right middle``.
        prompt_key: column that holds the message list.
        shuffle: seeded random order each epoch.
        seed: seed of that order and of made tasks; null takes ``trainer.seed``.
        train_max_samples, val_max_samples: rows to keep (or to make, for a made task); -1 keeps all.
        validation_shuffle: a random order of the validation rows, by ``trainer.seed``, another each time.
    """

    train_files: Any = "builtin:digits"
    val_files: Any = None
    train_batch_size: int = 8
    gen_batch_size: int | None = None
    val_batch_size: int | None = None
    train_max_samples: int = -1
    val_max_samples: int = -1
    max_prompt_length: int = 128
    max_response_length: int = 24
    filter_overlong_prompts: bool = False
    filter_overlong_prompts_workers: int = unused(1)
    truncation: str = "error"
    prompt_key: str = "prompt"
    reward_fn_key: str = unused("data_source")
    shuffle: bool = True
    validation_shuffle: bool = False
    seed: int | None = None
    dataloader_num_workers: int = unused(0)
    return_raw_chat: bool = unused(True)
    trust_remote_code: bool = unused(False)
    image_key: str = unused("images")
    video_key: str = unused("videos")
    tokenizer: str | None = unused(None)
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class KLControlConfig:
    """``algorithm.kl_ctrl``: coefficient of the KL in the reward.

    Attributes:
        type: ``fixed``, or ``adaptive``: the coefficient follows the KL towards ``target_kl``.
        kl_coef: coefficient at the start.
        horizon: trajectories over which the adaptive one moves.
        target_kl: KL it aims at, nats a token.
    """

    type: str = "fixed"
    kl_coef: float = 0.001
    horizon: int = 10000
    target_kl: float = 0.1


@dataclass
class FilterGroupsConfig:
    """``algorithm.filter_groups``: groups whose sessions all have the same metric teach nothing and are replaced.

    Attributes:
        enable: filter.
        metric: ``reward``, or a key of what the scorer returned beside the score.
        max_num_gen_batches: most batches generated for one step; 0 sets no limit.
        max_inflight_gen_batches: most batches of prompts pending or running at once.
    """

    enable: bool = False
    metric: str = "reward"
    max_num_gen_batches: int = 0
    max_inflight_gen_batches: int = 1


@dataclass
class RolloutCorrectionConfig:
    """``algorithm.rollout_correction``: the policy that sampled is not quite the policy that is trained.

    Attributes:
        bypass_mode: take ``rollout_log_probs`` as ``old_log_probs``, and compute none.
        loss_type: loss of the bypass mode: ``ppo_clip``, whose ratio is then taken to the sampler.
        rollout_is: importance weights on the loss, ``token`` or ``sequence``; null has none.
        rollout_is_threshold: weights above it are cut to it.
        rollout_is_batch_normalize: divide the weights by their mean over the batch.
        rollout_rs: rejection by an estimate of the divergence, e.g. ``token_k1``, ``seq_mean_k3``; null rejects none.
        rollout_rs_threshold: bound of that estimate, or ``lower_upper`` for a ratio.
    """

    bypass_mode: bool = False
    loss_type: str = "ppo_clip"
    rollout_is: str | None = None
    rollout_is_threshold: float = 2.0
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | None = None
    rollout_rs_threshold: Any = None


@dataclass
class AlgorithmConfig:
    """``algorithm``: the advantage.

    Attributes:
        adv_estimator: ``grpo``.
        norm_adv_by_std_in_grpo: divide the centred score by the group's standard deviation (plus 1e-6).
        use_kl_in_reward: take the KL to the reference off the reward of each token.
        kl_penalty: estimate of that KL: ``kl``, ``abs``, ``mse`` or ``low_var_kl``.
    """

    adv_estimator: str = "grpo"
    norm_adv_by_std_in_grpo: bool = True
    use_kl_in_reward: bool = False
    kl_penalty: str = "kl"
    gamma: float = unused(1.0)
    lam: float = unused(1.0)
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)


@dataclass
class CustomRewardFunctionConfig:
    """``reward.custom_reward_function``: a scorer in the user's own file.

    Attributes:
        path: Python file; null uses the registry.
        name: function in it, ``compute_score(data_source, solution_str, ground_truth, extra_info)``.
        reward_kwargs: more keyword arguments for it.
    """

    path: str | None = None
    name: str = "compute_score"
    reward_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class RewardModelConfig:
    """``reward.reward_model``: where scores are made.

    Attributes:
        enable: score the sampled batch as a whole, after the rollout (colocated), and not in the agent loop. The
            reward manager does it: a rule stands in for the model, which embedded mode has not.
        enable_resource_pool: a pool of its own lets the model score in the agent loop; not in embedded mode.
    """

    enable: bool = False
    enable_resource_pool: bool = False


@dataclass
class RewardConfig:
    """``reward``: how a trajectory is scored, inside the agent loop or after it.

    Attributes:
        scorer: scorer of every row; null chooses by ``data_source``.
        reward_manager: ``naive`` decodes the response and calls the scorer.
        num_workers: processes that score, with ``mode=ray``.
    """

    scorer: str | None = None
    reward_manager: str = "naive"
    num_workers: int = on_ray(1)
    custom_reward_function: CustomRewardFunctionConfig = field(default_factory=CustomRewardFunctionConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)


@dataclass
class LineageConfig:
    """``trainer.lineage``: what the trace is used for while training.

    Attributes:
        on_violation: ``raise`` checks each step as it is sealed and stops training at the first that breaks a contract;
            ``warn`` checks beside training and says so; ``off`` leaves the check to the end of the run.
    """

    on_violation: str = "off"


@dataclass
class SyncConfig:
    """``trainer.v1.sync``: the synchronous trainer.

    Attributes:
        parameter_sync_step: updates between two weight syncs; each takes so large a part of ``train_batch_size``.
    """

    parameter_sync_step: int = 1


@dataclass
class SamplerConfig:
    """``trainer.v1.sampler``: the replay buffer.

    Attributes:
        sync_refill_failed_groups: replace a group that failed without any output; prompts are then
            fetched one by one.
    """

    sync_refill_failed_groups: bool = False


@dataclass
class V1Config:
    """``trainer.v1``: verl's V1 trainer."""

    sync: SyncConfig = field(default_factory=SyncConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)


@dataclass
class TrainerConfig:
    """``trainer``: how long, on what, and what is kept.

    Attributes:
        total_training_steps: steps; null runs ``total_epochs`` passes over the data.
        total_epochs: used when ``total_training_steps`` is null (setting it alone makes the other null).
        n_gpus_per_node, nnodes: their product is the actor's ranks: its data-parallel size, times that of sequence
            parallelism; embedded mode plays them in turn.
        n_ranks: short for ``nnodes=1 n_gpus_per_node=...``.
        device: ``auto`` takes CUDA when there is one.
        logger: one or a list of ``console``, ``jsonl``, ``tensorboard``, ``wandb``, ``mlflow``, ``trackio``.
        project_name, experiment_name: what those services file the run under.
        save_freq: a checkpoint every so many steps; -1 never.
        balance_batch: even out the tokens of the data-parallel ranks.
        seed: seed of everything drawn in the run.
        default_local_dir: checkpoints; null is ``checkpoints`` in the run folder.
        resume_mode: ``disable``; ``auto``: from the newest checkpoint in ``default_local_dir``, if there is one;
            ``resume_path``: from ``resume_from_path``. The run is one of its own, and goes on as if it had never
            stopped: same seed, data and model are needed.
        resume_from_path: a ``global_step_<n>`` folder.
        rollout_data_dir: dump of prompts and responses as JSONL; null writes none.
        validation_data_dir: the same of the validation.
        val_before_train: validate once before the first step.
        val_only: stop after that.
        test_freq: validate every so many steps; -1 never.
        log_val_generations: validation answers printed; 0 none.
        lineage: what the trace is used for while training.
    """

    total_training_steps: int | None = 3
    total_epochs: int = 1
    n_gpus_per_node: int = 1
    nnodes: int = 1
    n_ranks: int | None = None
    device: str = "auto"
    logger: Any = field(default_factory=lambda: ["console", "jsonl"])
    project_name: str = "lineage"
    experiment_name: str = "grpo"
    save_freq: int = -1
    test_freq: int = -1
    val_before_train: bool = False
    val_only: bool = False
    seed: int = 42
    balance_batch: bool = True
    default_local_dir: str | None = None
    default_hdfs_dir: str | None = unused(None)
    resume_mode: str = "disable"
    resume_from_path: str | None = None
    max_actor_ckpt_to_keep: int | None = None
    rollout_data_dir: str | None = None
    validation_data_dir: str | None = None
    log_val_generations: int = 0
    critic_warmup: int = unused(0)
    use_v1: bool = unused(True)
    v1: V1Config = field(default_factory=V1Config)
    lineage: LineageConfig = field(default_factory=LineageConfig)


@dataclass
class TraceConfig:
    """``trace``: the flight recorder.

    Attributes:
        enabled: record. ``LINEAGE_DISABLED=1`` says no to every run.
        every: record one step in so many.
        keep_steps: keep the last so many traced steps, and never more than twice as many; null keeps all.
        reuse: contents of a step that are equal share their statistics.
        sidecar: record in a process of its own, so that a step pays for a snapshot only; with ``mode=ray``, which has
            processes enough, only where it is set.
        capture_text: store prompts and responses in the trace; not in this version. Off: a trace never holds them.
        weights: fingerprint every parameter at each weight sync, and a sample of the reference's whenever it scores.
        probe: so many rows a step are scored once more, each alone, by actor and reference; 0 scores none.
    """

    enabled: bool = True
    every: int = 1
    keep_steps: int | None = None
    reuse: bool = True
    sidecar: bool = True
    capture_text: bool = False
    weights: bool = True
    probe: int = 0


def _one_storage_unit() -> dict[str, Any]:
    """TransferQueue's own default is two, for machines of more cores."""
    return {"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}


@dataclass
class RayConfig:
    """``ray_kwargs``: the cluster of ``mode=ray``.

    Attributes:
        ray_init: arguments of ``ray.init``; ``address`` joins a cluster, else one is started with a logical CPU for
            every process of the run.
    """

    ray_init: dict[str, Any] = field(default_factory=dict, metadata=ON_RAY)


@dataclass
class PPOTrainerConfig:
    """The whole configuration.

    Attributes:
        mode: ``embedded``: one process, in-process store, transformers generation. ``ray``: the same trainer on Ray
            actors, TransferQueue and FSDP2.
        transfer_queue: TransferQueue's own configuration, with ``mode=ray``.
    """

    mode: str = "embedded"
    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    transfer_queue: dict[str, Any] = field(default_factory=_one_storage_unit, metadata=ON_RAY)
    ray_kwargs: RayConfig = field(default_factory=RayConfig)
