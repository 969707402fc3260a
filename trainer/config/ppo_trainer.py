"""The root of the configuration, verl's ``ppo_trainer``: data, actor_rollout_ref, algorithm, reward, trainer, trace."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lineage.trainer.config.actor_rollout_ref import NO_MEANING, ActorRolloutRefConfig, unused


@dataclass
class DataConfig:
    """``data``: prompts in.

    Attributes:
        train_files: parquet, json or jsonl file(s), ``reasoning_gym:<task>`` or ``builtin:<task>``.
        train_batch_size: B, prompt groups a step.
        max_prompt_length: tokens of a prompt after the chat template.
        max_response_length: tokens of a response.
        filter_overlong_prompts: leave rows with longer prompts out.
        truncation: what to do with one that is left: ``error left right middle``.
        prompt_key: column that holds the message list.
        shuffle: seeded random order each epoch.
        seed: seed of that order and of made tasks; null takes ``trainer.seed``.
        train_max_samples: rows to keep (or to make, for a made task); -1 keeps all.
    """

    train_files: Any = "builtin:digits"
    val_files: Any = field(default=None, metadata=NO_MEANING)
    train_batch_size: int = 8
    val_batch_size: int | None = unused(None)
    train_max_samples: int = -1
    val_max_samples: int = unused(-1)
    max_prompt_length: int = 128
    max_response_length: int = 24
    filter_overlong_prompts: bool = False
    filter_overlong_prompts_workers: int = unused(1)
    truncation: str = "error"
    prompt_key: str = "prompt"
    reward_fn_key: str = unused("data_source")
    shuffle: bool = True
    validation_shuffle: bool = unused(False)
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
    """``algorithm.kl_ctrl``: coefficient of the KL in the reward."""

    type: str = unused("fixed")
    kl_coef: float = unused(0.001)
    horizon: int = unused(10000)
    target_kl: float = unused(0.1)


@dataclass
class AlgorithmConfig:
    """``algorithm``: the advantage.

    Attributes:
        adv_estimator: ``grpo``.
        norm_adv_by_std_in_grpo: divide the centred score by the group's standard deviation (plus 1e-6).
    """

    adv_estimator: str = "grpo"
    norm_adv_by_std_in_grpo: bool = True
    use_kl_in_reward: bool = False
    kl_penalty: str = unused("kl")
    gamma: float = unused(1.0)
    lam: float = unused(1.0)
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)


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
class RewardConfig:
    """``reward``: how a trajectory is scored, inside the agent loop.

    Attributes:
        scorer: scorer of every row; null chooses by ``data_source``.
        reward_manager: ``naive`` decodes the response and calls the scorer.
    """

    scorer: str | None = None
    reward_manager: str = "naive"
    num_workers: int = unused(1)
    custom_reward_function: CustomRewardFunctionConfig = field(default_factory=CustomRewardFunctionConfig)


@dataclass
class LineageConfig:
    """``trainer.lineage``: what the trace is used for while training.

    Attributes:
        on_violation: ``raise`` checks each step as it is sealed and stops training at the first that breaks a contract;
            ``warn`` checks beside training and says so; ``off`` leaves the check to the end of the run.
    """

    on_violation: str = "off"


@dataclass
class TrainerConfig:
    """``trainer``: how long, on what, and what is kept.

    Attributes:
        total_training_steps: steps; null runs ``total_epochs`` passes over the data.
        total_epochs: used when ``total_training_steps`` is null (setting it alone makes the other null).
        n_gpus_per_node, nnodes: their product is the actor's data-parallel size, simulated in embedded mode.
        device: ``auto`` takes CUDA when there is one.
        logger: one or a list of ``console``, ``jsonl``.
        save_freq: a checkpoint every so many steps; -1 never.
        balance_batch: even out the tokens of the data-parallel ranks.
        seed: seed of everything drawn in the run.
        default_local_dir: checkpoints; null is ``checkpoints`` in the run folder.
        resume_mode: ``disable`` or ``auto``: every run has a folder of its own, where there is nothing to resume.
        rollout_data_dir: dump of prompts and responses as JSONL; null writes none.
        lineage: what the trace is used for while training.
    """

    total_training_steps: int | None = 3
    total_epochs: int = 1
    n_gpus_per_node: int = 1
    nnodes: int = 1
    device: str = "auto"
    logger: Any = field(default_factory=lambda: ["console", "jsonl"])
    project_name: str = unused("lineage")
    experiment_name: str = unused("grpo")
    save_freq: int = -1
    test_freq: int = unused(-1)
    val_before_train: bool = unused(False)
    val_only: bool = unused(False)
    seed: int = 42
    balance_batch: bool = True
    default_local_dir: str | None = None
    default_hdfs_dir: str | None = unused(None)
    resume_mode: str = "disable"
    resume_from_path: str | None = unused(None)
    max_actor_ckpt_to_keep: int | None = None
    rollout_data_dir: str | None = None
    log_val_generations: int = unused(0)
    critic_warmup: int = unused(0)
    use_v1: bool = unused(True)
    lineage: LineageConfig = field(default_factory=LineageConfig)


@dataclass
class TraceConfig:
    """``trace``: the flight recorder.

    Attributes:
        enabled: record. ``LINEAGE_DISABLED=1`` says no to every run.
        every: record one step in so many.
        keep_steps: keep the last so many traced steps, and never more than twice as many; null keeps all.
        reuse: contents of a step that are equal share their statistics.
        sidecar: record in a process of its own, so that a step pays for a snapshot only.
        capture_text: store prompts and responses in the trace; not in this version. Off: a trace never holds them.
        weights: fingerprint every parameter at each weight sync.
    """

    enabled: bool = True
    every: int = 1
    keep_steps: int | None = None
    reuse: bool = True
    sidecar: bool = True
    capture_text: bool = False
    weights: bool = True


@dataclass
class PPOTrainerConfig:
    """The whole configuration.

    Attributes:
        mode: ``embedded``: one process, in-process store, transformers generation.
    """

    mode: str = "embedded"
    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
