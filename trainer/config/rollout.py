"""What ``rollout.name`` asks for beside its name: a mode, a model it serves, log-probs that can be used."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from lineage.trainer.config.errors import ConfigError

# Built-in models that vLLM does not serve on a CPU, as their heads are too small, and what is like them and served.
SERVED_AS = {"tiny": "tiny_tied"}
_ROLLOUT, _MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model.path"


def adapt_to_engine(config: DictConfig) -> list[str]:
    """Take a model the engine serves for one it does not, in place; one line that says so."""
    model = config.actor_rollout_ref.model.path
    if config.mode != "ray" or config.actor_rollout_ref.rollout.name != "vllm" or model not in SERVED_AS:
        return []
    OmegaConf.update(config, _MODEL, SERVED_AS[model])
    return [f"replaced: {_MODEL}={model} by {SERVED_AS[model]}: vLLM does not serve its heads of 16 on a CPU"]


def check_rollout(config: DictConfig) -> list[str]:
    """Check the keys of the rollout against its engine.

    Returns:
        Warnings, one line each.

    Raises:
        ConfigError: the first rule that is broken, in one line.
    """
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "vllm":
        if rollout.num_replicas > 1:
            raise ConfigError(
                f"{_ROLLOUT}.num_replicas={rollout.num_replicas} needs {_ROLLOUT}.name=vllm and mode=ray: "
                "the transformers engine is one"
            )
        return []
    if config.mode != "ray":
        raise ConfigError(
            f"{_ROLLOUT}.name=vllm needs mode=ray: the engine takes over the threads, seeds and process groups of its "
            "process, and embedded mode trains in the same one; take mode=ray, or rollout.name=hf"
        )
    if rollout.tensor_model_parallel_size > 1:
        raise ConfigError(
            f"{_ROLLOUT}.tensor_model_parallel_size={rollout.tensor_model_parallel_size} is not supported: a replica "
            f"is one process that holds the whole model; take more of them by {_ROLLOUT}.num_replicas"
        )
    return _check_log_probs(config)


def _check_log_probs(config: DictConfig) -> list[str]:
    """vLLM's processed log-probs are over the tokens that top_p and top_k left: not the actor's distribution."""
    rollout, correction = config.actor_rollout_ref.rollout, config.algorithm.rollout_correction
    narrowed = rollout.top_p < 1 or rollout.top_k > 0
    if not narrowed or rollout.logprobs_mode != "processed_logprobs" or not rollout.calculate_log_probs:
        return []
    how = f"{_ROLLOUT}.top_p={rollout.top_p}" if rollout.top_p < 1 else f"{_ROLLOUT}.top_k={rollout.top_k}"
    used = {
        "bypass_mode=true": correction.bypass_mode,
        f"rollout_is={correction.rollout_is}": correction.rollout_is,
        f"rollout_rs={correction.rollout_rs}": correction.rollout_rs,
    }
    asked = next((f"algorithm.rollout_correction.{key}" for key, value in used.items() if value), None)
    if asked is not None:
        raise ConfigError(
            f"{asked} with {how}: the log-probs vLLM gives are over the tokens that are left, the actor's over all; "
            f"set top_p=1 and top_k=-1, or take {_ROLLOUT}.name=hf"
        )
    return [f"{how}: the rollout's log-probs are over the tokens that are left, and comparable to no one else's"]
