"""What a configuration must satisfy before a run: verl's ``validate_config`` and the limits of embedded mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from lineage.hooks import disabled
from lineage.trainer.config.compose import overridden
from lineage.trainer.config.errors import ConfigError
from lineage.trainer.config.rollout import adapt_to_engine, check_rollout
from lineage.trainer.config.tree import keys
from lineage.trainer.correction.rejection_rules import rejection_rules
from lineage.trainer.engine.topology import TopologyError, fsdp_data_parallel_size, shard_ranks, world_size

_KL_ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
# Values this version runs; anything else is one error line that names these.
CHOICES: dict[str, tuple[str | None, ...]] = {
    "mode": ("embedded", "ray"),
    "algorithm.adv_estimator": ("grpo",),
    "actor_rollout_ref.actor.kl_loss_type": (*_KL_ESTIMATORS, *(f"{name}+" for name in _KL_ESTIMATORS)),
    "algorithm.kl_penalty": _KL_ESTIMATORS,
    "algorithm.kl_ctrl.type": ("fixed", "adaptive"),
    "algorithm.rollout_correction.rollout_is": (None, "token", "sequence"),
    "algorithm.rollout_correction.loss_type": ("ppo_clip",),
    "actor_rollout_ref.actor.loss_agg_mode": ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"),
    "actor_rollout_ref.actor.optim.lr_scheduler_type": ("constant", "cosine"),
    "actor_rollout_ref.rollout.name": ("hf", "vllm"),
    "actor_rollout_ref.rollout.logprobs_mode": ("processed_logprobs", "raw_logprobs"),
    "actor_rollout_ref.rollout.multi_turn.format": ("hermes",),
    "actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side": ("left", "right", "middle"),
    "data.truncation": ("error", "left", "right", "middle"),
    "reward.reward_manager": ("naive",),
    "trainer.lineage.on_violation": ("raise", "warn", "off"),
    "trainer.resume_mode": ("disable", "auto", "resume_path"),
}
POSITIVE = (
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.agent.num_workers",
    "actor_rollout_ref.rollout.max_num_seqs",
    "actor_rollout_ref.rollout.num_replicas",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "actor_rollout_ref.rollout.max_num_batched_tokens",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.ppo_epochs",
    "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size",
    "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.actor.grad_clip",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "reward.num_workers",
    "trainer.total_epochs",
    "trainer.v1.sync.parameter_sync_step",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "actor_rollout_ref.rollout.val_kwargs.n",
    "actor_rollout_ref.rollout.multi_turn.max_parallel_calls",
    "actor_rollout_ref.rollout.multi_turn.max_tool_response_length",
    "algorithm.filter_groups.max_inflight_gen_batches",
    "algorithm.rollout_correction.rollout_is_threshold",
    "algorithm.kl_ctrl.horizon",
    "algorithm.kl_ctrl.target_kl",
    "actor_rollout_ref.model.lora_alpha",
    "trace.every",
)
POSITIVE_OR_NULL = (
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.prompt_length",
    "actor_rollout_ref.rollout.response_length",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns",
    "actor_rollout_ref.rollout.multi_turn.max_user_turns",
    "data.gen_batch_size",
    "data.val_batch_size",
    "trainer.n_ranks",
    "trainer.total_training_steps",
    "trainer.max_actor_ckpt_to_keep",
    "trace.keep_steps",
)
NOT_NEGATIVE_OR_NULL = (
    "actor_rollout_ref.actor.clip_ratio",
    "actor_rollout_ref.actor.clip_ratio_low",
    "actor_rollout_ref.actor.clip_ratio_high",
    "actor_rollout_ref.actor.kl_loss_coef",
    "actor_rollout_ref.actor.entropy_coeff",
    "actor_rollout_ref.actor.optim.weight_decay",
    "actor_rollout_ref.actor.optim.eps",
    "algorithm.kl_ctrl.kl_coef",
    "algorithm.filter_groups.max_num_gen_batches",
    "trainer.log_val_generations",
    "trace.probe",
)
SEEDS = ("trainer.seed", "data.seed", "actor_rollout_ref.actor.data_loader_seed")
FALSE_ONLY = {
    "reward.reward_model.enable_resource_pool": "the reward model has no resources of its own here",
    "trace.capture_text": "the recorder of this version keeps no text",
}
LOGGERS = ("console", "jsonl", "tensorboard", "wandb", "mlflow", "trackio")
# verl values that change how the work is packed or served, not what it computes: accepted, said, and replaced.
REPLACED: dict[str, dict[Any, tuple[Any, str]]] = {
    "actor_rollout_ref.rollout.name": {
        "sglang": ("hf", "this version generates with transformers or vLLM"),
    },
}


def need_reference_policy(config: DictConfig) -> bool:
    """True when a KL to the reference is used, in the loss or in the reward (verl ``need_reference_policy``)."""
    return bool(config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward)


def sequence_parallel_size(config: DictConfig) -> int:
    """Ranks that share the sequences of one replica; in embedded mode nothing is shared out."""
    if config.mode != "ray":
        return 1
    return int(config.actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size)


def loggers(config: DictConfig) -> list[str]:
    """``trainer.logger`` as a list of names: verl takes one name or several."""
    names = config.trainer.logger
    return [names] if isinstance(names, str) else [str(name) for name in names or ()]


def adapt_to_mode(config: DictConfig, overrides: Sequence[str] = ()) -> list[str]:
    """Replace verl values that are served another way here, in place, and say so.

    Args:
        config: composed configuration; afterwards it says what will really run.
        overrides: what the user typed: only those are mentioned.

    Returns:
        One line for each key accepted without its meaning: ``ignored: ... has no meaning in mode=embedded``.
    """
    lines = []
    for key, answers in REPLACED.items():
        value = OmegaConf.select(config, key)
        if value in answers:
            instead, why = answers[value]
            with open_dict(config):
                OmegaConf.update(config, key, instead)
            lines.append(f"ignored: {key}={_text(value)} has no meaning in mode={config.mode} ({why})")
    lines += adapt_to_engine(config)
    typed = dict.fromkeys(overridden(overrides))
    engine = config.actor_rollout_ref.rollout.name
    heard = {"ray": config.mode == "ray", "vllm": engine == "vllm"}
    nothing = {name: (default, field.metadata.get("meaning", "any")) for name, default, field in keys()}
    for key in typed:
        default, meaning = nothing.get(key, (None, "any"))
        value = OmegaConf.select(config, key)
        if meaning != "any" and not heard.get(meaning) and value != default:
            where = f"with rollout.name={engine}" if meaning == "vllm" else f"in mode={config.mode}"
            lines.append(f"ignored: {key}={_text(value)} has no meaning {where}")
    return lines


def validate_config(config: DictConfig) -> list[str]:
    """Check a configuration (verl ``validate_config``).

    Let B = ``data.train_batch_size``, M = ``actor.ppo_mini_batch_size``, both in prompts. ``M > B`` is an error. ``B``
    not a multiple of ``M`` is allowed: the balance stage adds padding rows (mask 0) until the batch divides, and one
    warning says so.

    Returns:
        Warnings, one line each.

    Raises:
        ConfigError: the first rule that is broken, in one line.
    """
    if config.algorithm.adv_estimator == "gae":
        raise ConfigError(
            "algorithm.adv_estimator=gae is not supported: GRPO has no critic, so no values and no GAE; "
            "use one of: grpo"
        )
    for key, allowed in CHOICES.items():
        value = OmegaConf.select(config, key)
        if value not in allowed:
            raise ConfigError(f"{key}={_text(value)} is not supported; use one of: {', '.join(map(_text, allowed))}")
    for key, why in FALSE_ONLY.items():
        if OmegaConf.select(config, key):
            raise ConfigError(f"{key}=true is not supported; {why}")
    for key in POSITIVE:
        _positive(key, OmegaConf.select(config, key))
    for key in POSITIVE_OR_NULL:
        value = OmegaConf.select(config, key)
        if value is not None:
            _positive(key, value)
    for key in NOT_NEGATIVE_OR_NULL:
        value = OmegaConf.select(config, key)
        if value is not None and not value >= 0:
            raise ConfigError(f"{key}={value} must not be negative")
    for key in SEEDS:
        value = OmegaConf.select(config, key)
        if value is not None and not -(2**63) <= value < 2**63:
            raise ConfigError(f"{key}={value} must be an integer of 64 bits, from -2**63 to 2**63 - 1")
    _check_sampling(config)
    _check_actor(config)
    _check_adapter(config)
    _check_trainer(config)
    return [
        *_check_lineage(config),
        *_check_resume(config),
        *_check_correction(config),
        *check_rollout(config),
        *_check_groups(config),
        *_check_batch_sizes(config),
    ]


def _check_batch_sizes(config: DictConfig) -> list[str]:
    whole, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    several = config.trainer.v1.sync.parameter_sync_step
    if whole % several:
        raise ConfigError(
            f"data.train_batch_size={whole} is not a multiple of trainer.v1.sync.parameter_sync_step={several}: "
            "a step is sampled in so many batches of equal size"
        )
    fetched = 1 if _replaces_groups(config) else config.data.gen_batch_size or whole
    if whole % fetched:
        raise ConfigError(
            f"data.train_batch_size={whole} is not a multiple of data.gen_batch_size={fetched}: "
            "the prompts of a step are fetched so many at a time"
        )
    batch = whole // several
    name = f"data.train_batch_size={whole}" + (f" / parameter_sync_step={several}" if several > 1 else "")
    if mini > batch:
        raise ConfigError(
            f"actor_rollout_ref.actor.ppo_mini_batch_size={mini} is greater than {name}; "
            "both count prompts, and a mini-batch is a part of the batch"
        )
    sessions = config.actor_rollout_ref.rollout.n
    sp = sequence_parallel_size(config)
    ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes // sp
    if mini * sessions % ranks:
        shared = " / ulysses_sequence_parallel_size" if sp > 1 else ""
        raise ConfigError(
            f"ppo_mini_batch_size * rollout.n = {mini * sessions} does not divide over {ranks} data-parallel ranks "
            f"(trainer.n_gpus_per_node * trainer.nnodes{shared})"
        )
    if batch % mini:
        padded = -(-batch // mini) * mini * sessions
        return [
            f"{name} is not a multiple of ppo_mini_batch_size={mini}: "
            f"each {'batch' if several > 1 else 'step'} is padded from {batch * sessions} to {padded} rows"
        ]
    return []


def _replaces_groups(config: DictConfig) -> list[str]:
    """The keys that are set and have groups replaced, one by one, while a batch is sampled."""
    switches = ("algorithm.filter_groups.enable", "trainer.v1.sampler.sync_refill_failed_groups")
    return [key for key in switches if OmegaConf.select(config, key)]


def _check_groups(config: DictConfig) -> list[str]:
    """What replaces groups needs their scores, a rollout that is awake, and prompts one by one."""
    replacing = _replaces_groups(config)
    for key in replacing:
        several = config.trainer.v1.sync.parameter_sync_step
        if several > 1:
            raise ConfigError(
                f"{key}=true with trainer.v1.sync.parameter_sync_step={several}: the rollout sleeps after the first "
                "batch of a step and can replace no group of the next; set one of them off"
            )
    if config.algorithm.filter_groups.enable and config.reward.reward_model.enable:
        raise ConfigError(
            "algorithm.filter_groups.enable=true with reward.reward_model.enable=true: groups are filtered by their "
            "scores while they are sampled, and a colocated reward scores them after it; set one of them off"
        )
    if replacing and config.data.gen_batch_size not in (None, 1):
        return [
            f"data.gen_batch_size={config.data.gen_batch_size} is replaced by 1: {replacing[0]}=true replaces groups "
            "one by one"
        ]
    return []


def _check_sampling(config: DictConfig) -> None:
    rollout = config.actor_rollout_ref.rollout
    if rollout.temperature <= 0:
        raise ConfigError(f"actor_rollout_ref.rollout.temperature={rollout.temperature} must be greater than 0")
    if not 0 < rollout.top_p <= 1:
        raise ConfigError(f"actor_rollout_ref.rollout.top_p={rollout.top_p} must be in (0, 1]")
    if rollout.top_k == 0 or rollout.top_k < -1:
        raise ConfigError(f"actor_rollout_ref.rollout.top_k={rollout.top_k} must be -1 (all tokens) or at least 1")


def _check_actor(config: DictConfig) -> None:
    actor = config.actor_rollout_ref.actor
    betas = list(actor.optim.betas)
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(f"actor_rollout_ref.actor.optim.betas={betas} must be two numbers in [0, 1)")
    if actor.clip_ratio_c <= 1:
        raise ConfigError(f"actor_rollout_ref.actor.clip_ratio_c={actor.clip_ratio_c} must be greater than 1")


def _check_adapter(config: DictConfig) -> None:
    model = config.actor_rollout_ref.model
    if model.lora_rank < 0:
        raise ConfigError(f"actor_rollout_ref.model.lora_rank={model.lora_rank} must be 0 (no adapter) or greater")
    targets = model.target_modules
    names = [targets] if isinstance(targets, str) else list(targets) if OmegaConf.is_list(targets) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"actor_rollout_ref.model.target_modules={_text(targets)} must be all-linear, a name or a list of names"
        )


def _check_correction(config: DictConfig) -> list[str]:
    """What the rollout correction corrects by are the sampler's log-probs."""
    correction, rollout = config.algorithm.rollout_correction, config.actor_rollout_ref.rollout
    prefix = "algorithm.rollout_correction"
    rejection_rules(correction.rollout_rs, correction.rollout_rs_threshold)
    wanted = {
        f"{prefix}.bypass_mode=true": correction.bypass_mode,
        f"{prefix}.rollout_is={correction.rollout_is}": correction.rollout_is,
        f"{prefix}.rollout_rs={correction.rollout_rs}": correction.rollout_rs,
    }
    asked = next((key for key, value in wanted.items() if value), None)
    if asked and not rollout.calculate_log_probs:
        raise ConfigError(f"{asked} needs actor_rollout_ref.rollout.calculate_log_probs=true")
    if asked and rollout.logprobs_mode == "raw_logprobs" and rollout.temperature != 1:
        raise ConfigError(
            f"{asked} compares log-probs at the sampling temperature {rollout.temperature}; "
            "set actor_rollout_ref.rollout.logprobs_mode=processed_logprobs"
        )
    if correction.bypass_mode and correction.rollout_is:
        return [f"{prefix}.rollout_is makes metrics only in bypass mode: the ratio of the loss is the weight"]
    return []


def _check_trainer(config: DictConfig) -> None:
    unknown = [name for name in loggers(config) if name not in LOGGERS]
    if unknown:
        raise ConfigError(f"trainer.logger: unknown {', '.join(unknown)}; known: {', '.join(LOGGERS)}")
    _check_validation(config)
    trainer, device = config.trainer, config.trainer.device
    if device.partition(":")[0] not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"trainer.device={device} is not supported; use one of: auto, cpu, cuda")
    if ":" in device and config.mode == "ray":
        raise ConfigError(f"trainer.device={device}: with mode=ray each process is given a device by Ray; set cuda")
    if config.mode == "ray":  # embedded mode shards nothing
        world = world_size(trainer.nnodes, trainer.n_gpus_per_node)
        try:
            shard_ranks(world, config.actor_rollout_ref.actor.fsdp_config.fsdp_size)
            fsdp_data_parallel_size(world, sequence_parallel_size(config))
        except TopologyError as error:
            raise ConfigError(str(error)) from error


def _check_validation(config: DictConfig) -> None:
    trainer, drawn = config.trainer, config.actor_rollout_ref.rollout.val_kwargs
    if trainer.val_only and not trainer.val_before_train:
        raise ConfigError("trainer.val_only=true stops after the validation of trainer.val_before_train: set it true")
    asked = "trainer.val_before_train=true" if trainer.val_before_train else f"trainer.test_freq={trainer.test_freq}"
    if (trainer.val_before_train or trainer.test_freq > 0) and config.data.val_files is None:
        raise ConfigError(f"{asked} needs prompts to validate on: set data.val_files")
    key = "actor_rollout_ref.rollout.val_kwargs"
    if drawn.do_sample and drawn.temperature <= 0:
        raise ConfigError(f"{key}.do_sample=true needs {key}.temperature greater than 0, not {drawn.temperature}")
    if not 0 < drawn.top_p <= 1:
        raise ConfigError(f"{key}.top_p={drawn.top_p} must be in (0, 1]")
    if drawn.top_k == 0 or drawn.top_k < -1:
        raise ConfigError(f"{key}.top_k={drawn.top_k} must be -1 (all tokens) or at least 1")


def _check_resume(config: DictConfig) -> list[str]:
    """What a run that is to go on may have been told in vain."""
    trainer = config.trainer
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        raise ConfigError("trainer.resume_mode=resume_path needs trainer.resume_from_path=.../global_step_<n>")
    if trainer.resume_mode == "auto" and trainer.default_local_dir is None:
        return [
            "trainer.resume_mode=auto finds nothing to go on from: without trainer.default_local_dir checkpoints are "
            "in the run folder, and that is new"
        ]
    if trainer.resume_mode != "resume_path" and trainer.resume_from_path is not None:
        return [f"trainer.resume_from_path is not read: trainer.resume_mode={trainer.resume_mode}"]
    return []


def _check_lineage(config: DictConfig) -> list[str]:
    """A run that is to be checked step by step is traced."""
    wanted = config.trainer.lineage.on_violation
    if wanted == "off":
        return []
    if not config.trace.enabled or disabled():
        why = "LINEAGE_DISABLED is set" if disabled() else "trace.enabled=false"
        raise ConfigError(
            f"trainer.lineage.on_violation={wanted} checks what is traced, and {why}: trace, or set it off"
        )
    if config.mode == "ray":
        raise ConfigError(
            f"trainer.lineage.on_violation={wanted} judges the rows of one process, and mode=ray has several: set it "
            "off; the whole trace is checked when the run ends"
        )
    if config.trace.every > 1:
        return [f"trainer.lineage.on_violation={wanted} sees one step in {config.trace.every} (trace.every)"]
    return []


def _positive(key: str, value: Any) -> None:
    if value is None or not value > 0:  # nan is neither
        raise ConfigError(f"{key}={_text(value)} must be greater than 0")


def _text(value: Any) -> str:
    """A value as one types it in an override."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
