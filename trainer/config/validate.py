"""What a configuration must satisfy before a run: verl's ``validate_config`` and the limits of embedded mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from lineage.hooks import disabled
from lineage.trainer.config.compose import keys, overridden
from lineage.trainer.config.errors import ConfigError

# Values this version runs; anything else is one error line that names these.
CHOICES: dict[str, tuple[str, ...]] = {
    "mode": ("embedded",),
    "algorithm.adv_estimator": ("grpo",),
    "actor_rollout_ref.actor.kl_loss_type": ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"),
    "actor_rollout_ref.actor.loss_agg_mode": ("token-mean",),
    "actor_rollout_ref.actor.optim.lr_scheduler_type": ("constant", "cosine"),
    "actor_rollout_ref.rollout.name": ("hf",),
    "actor_rollout_ref.rollout.logprobs_mode": ("processed_logprobs", "raw_logprobs"),
    "data.truncation": ("error", "left", "right", "middle"),
    "reward.reward_manager": ("naive",),
    "trainer.lineage.on_violation": ("raise", "warn", "off"),
    "trainer.resume_mode": ("disable", "auto"),
}
POSITIVE = (
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.agent.num_workers",
    "actor_rollout_ref.rollout.max_num_seqs",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.ppo_epochs",
    "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.actor.grad_clip",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.total_epochs",
    "trace.every",
)
POSITIVE_OR_NULL = (
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.prompt_length",
    "actor_rollout_ref.rollout.response_length",
    "trainer.total_training_steps",
    "trainer.max_actor_ckpt_to_keep",
    "trace.keep_steps",
)
FALSE_ONLY = {
    "algorithm.use_kl_in_reward": "the KL goes into the loss here: actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.rollout.multi_turn.enable": "this version has the single-turn agent loop",
    "trace.capture_text": "the recorder of this version keeps no text",
}
LOGGERS = ("console", "jsonl")
# verl values that change how the work is packed or served, not what it computes: accepted, said, and replaced.
REPLACED: dict[str, dict[Any, tuple[Any, str]]] = {
    "actor_rollout_ref.rollout.name": {
        "vllm": ("hf", "embedded mode generates with transformers"),
        "sglang": ("hf", "embedded mode generates with transformers"),
    },
    "actor_rollout_ref.actor.use_dynamic_bsz": {
        True: (False, "micro-batches have ppo_micro_batch_size_per_gpu rows; the update is the same"),
    },
}


def need_reference_policy(config: DictConfig) -> bool:
    """True when a KL to the reference is used, in the loss or in the reward (verl ``need_reference_policy``)."""
    return bool(config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward)


def loggers(config: DictConfig) -> list[str]:
    """``trainer.logger`` as a list of names: verl takes one name or several."""
    names = config.trainer.logger
    return [names] if isinstance(names, str) else [str(name) for name in names or ()]


def adapt_to_embedded(config: DictConfig, overrides: Sequence[str] = ()) -> list[str]:
    """Replace verl values that embedded mode serves another way, in place, and say so.

    Args:
        config: composed configuration; afterwards it says what will really run.
        overrides: what the user typed: only those are mentioned.

    Returns:
        One line for each key accepted without its meaning: ``ignored: ... has no meaning in embedded mode``.
    """
    lines = []
    for key, answers in REPLACED.items():
        value = OmegaConf.select(config, key)
        if value in answers:
            instead, why = answers[value]
            with open_dict(config):
                OmegaConf.update(config, key, instead)
            lines.append(f"ignored: {key}={_text(value)} has no meaning in embedded mode ({why})")
    typed = dict.fromkeys(overridden(overrides))
    nothing = {name: default for name, default, field in keys() if field.metadata.get("meaning") == "none"}
    for key in typed:
        if key in nothing and OmegaConf.select(config, key) != nothing[key]:
            value = OmegaConf.select(config, key)
            lines.append(f"ignored: {key}={_text(value)} has no meaning in embedded mode")
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
    for key, allowed in CHOICES.items():
        value = OmegaConf.select(config, key)
        if value not in allowed:
            raise ConfigError(f"{key}={_text(value)} is not supported; use one of: {', '.join(allowed)}")
    for key, why in FALSE_ONLY.items():
        if OmegaConf.select(config, key):
            raise ConfigError(f"{key}=true is not supported; {why}")
    for key in POSITIVE:
        _positive(key, OmegaConf.select(config, key))
    for key in POSITIVE_OR_NULL:
        value = OmegaConf.select(config, key)
        if value is not None:
            _positive(key, value)
    _check_sampling(config)
    _check_actor(config)
    _check_trainer(config)
    return [*_check_lineage(config), *_check_batch_sizes(config)]


def _check_batch_sizes(config: DictConfig) -> list[str]:
    batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    if mini > batch:
        raise ConfigError(
            f"actor_rollout_ref.actor.ppo_mini_batch_size={mini} is greater than data.train_batch_size={batch}; "
            "both count prompts, and a mini-batch is a part of the batch"
        )
    sessions = config.actor_rollout_ref.rollout.n
    ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes
    if mini * sessions % ranks:
        raise ConfigError(
            f"ppo_mini_batch_size * rollout.n = {mini * sessions} does not divide over {ranks} data-parallel ranks "
            "(trainer.n_gpus_per_node * trainer.nnodes)"
        )
    if batch % mini:
        return [
            f"data.train_batch_size={batch} is not a multiple of ppo_mini_batch_size={mini}: "
            f"each step is padded from {batch * sessions} to {-(-batch // mini) * mini * sessions} rows"
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
    for key in ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "kl_loss_coef", "entropy_coeff"):
        value = actor[key]
        if value is not None and value < 0:
            raise ConfigError(f"actor_rollout_ref.actor.{key}={value} must not be negative")


def _check_trainer(config: DictConfig) -> None:
    unknown = [name for name in loggers(config) if name not in LOGGERS]
    if unknown:
        raise ConfigError(f"trainer.logger: unknown {', '.join(unknown)}; known: {', '.join(LOGGERS)}")
    device = config.trainer.device
    if device.partition(":")[0] not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"trainer.device={device} is not supported; use one of: auto, cpu, cuda")


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
    if config.trace.every > 1:
        return [f"trainer.lineage.on_violation={wanted} sees one step in {config.trace.every} (trace.every)"]
    return []


def _positive(key: str, value: Any) -> None:
    if value is None or value <= 0:
        raise ConfigError(f"{key}={_text(value)} must be greater than 0")


def _text(value: Any) -> str:
    """A value as one types it in an override."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
