"""Random configurations that are valid, for the law that a clean run breaks no code.

What is drawn depends on what was drawn before it, so that nothing has to be thrown away. Who draws is left open: a
seeded generator in ``lineage selftest --clean-runs``, hypothesis in the tests, which then shrinks a failing one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

_T = TypeVar("_T")
#: answers with one of the choices; the name says what is drawn
Pick = Callable[[str, Sequence[_T]], _T]

_ACTOR, _ROLLOUT, _REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
_CORRECTION = "algorithm.rollout_correction"
LOOPS = ("single_turn", "tools", "multi_output", "failures")
LOSS_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
KL_TYPES = ("kl", "abs", "mse", "low_var_kl", "k3+")
CORRECTIONS = ("none", "none", "token_weights", "sequence_weights", "token_rejection", "sequence_rejection", "bypass")
BOTH = (True, False)
RARELY = (False, False, False, True)


@dataclass(frozen=True)
class Configuration:
    """One drawn configuration.

    Attributes:
        overrides: beyond the lab's.
        resume_after: the step after which the run stops, to go on from its checkpoint as another run; 0 never.
    """

    overrides: tuple[str, ...]
    resume_after: int = 0


def draw(source: random.Random) -> Configuration:
    """A configuration that ``validate_config`` accepts, from a seeded generator."""
    return drawn(lambda name, choices: source.choice(choices))


def drawn(pick: Pick[Any]) -> Configuration:
    """A configuration that ``validate_config`` accepts, whoever draws."""
    loop = pick("loop", LOOPS)
    chosen, replaces_groups = _sizes(pick, loop)
    chosen |= _sampling(pick)
    chosen |= _loss(pick, sampled_raw=chosen[f"{_ROLLOUT}.logprobs_mode"] == "raw_logprobs")
    chosen |= _micro_batches(pick)
    chosen["reward.reward_model.enable"] = pick("reward_colocated", RARELY) and not replaces_groups
    chosen["actor_rollout_ref.model.lora_rank"] = pick("lora_rank", (0, 0, 0, 4))
    chosen["trace.probe"] = pick("probe", (1, 1, 2, 0))
    chosen["trainer.balance_batch"] = pick("balance_batch", (True, True, False))
    chosen["trainer.seed"] = pick("seed", range(1000))
    chosen |= _kept(pick)
    steps = pick("steps", (2, 3))
    chosen["trainer.total_training_steps"] = steps
    resume_after = pick("resume_after", range(1, steps)) if pick("resume", RARELY) else 0
    return Configuration((*_loop(loop), *(f"{key}={_typed(value)}" for key, value in chosen.items())), resume_after)


def _loop(loop: str) -> tuple[str, ...]:
    """Who runs the sessions; the experiments' own sizes are replaced by what is drawn."""
    if loop == "failures":
        return (
            f"{_ROLLOUT}.agent.default_agent_loop=flaky_or_empty_agent",
            f"{_ROLLOUT}.agent.agent_loop_config_path=pkg://lineage.trainer.agent_loop/flaky.yaml",
        )
    return () if loop == "single_turn" else (f"+experiment={loop}",)


def _sizes(pick: Pick[Any], loop: str) -> tuple[dict[str, Any], bool]:
    """Batches, groups, ranks, lengths; and whether groups are replaced while a batch is sampled."""
    # a step whose sessions all failed has nothing to train on, and says so
    least = 2 if loop == "failures" else 1
    mini, sessions = pick("ppo_mini_batch_size", (least, 2, 3)), pick("n", range(least, 5))
    batches = pick("parameter_sync_step", (1, 1, 1, 2))
    batch = mini + pick("beyond_mini_batch", (0, 1, 2))
    chosen = {
        "data.train_batch_size": batches * batch,
        "data.max_response_length": pick("max_response_length", (64, 128) if loop == "tools" else (3, 8, 16)),
        "data.shuffle": pick("data_shuffle", BOTH),
        f"{_ACTOR}.ppo_mini_batch_size": mini,
        f"{_ACTOR}.ppo_epochs": pick("ppo_epochs", (1, 1, 2)),
        f"{_ACTOR}.shuffle": pick("shuffle", BOTH),
        f"{_ROLLOUT}.n": sessions,
        f"{_ROLLOUT}.agent.num_workers": pick("num_workers", (1, 2)),
        "trainer.n_gpus_per_node": pick("ranks", [ranks for ranks in (1, 2, 3, 4) if mini * sessions % ranks == 0]),
        "trainer.v1.sync.parameter_sync_step": batches,
    }
    refills = batches == 1 and loop == "failures" and pick("refill", BOTH)
    chosen["trainer.v1.sampler.sync_refill_failed_groups"] = refills
    return chosen, refills


def _sampling(pick: Pick[Any]) -> dict[str, Any]:
    """How tokens are drawn, and now and then that hardly anything is left to chance."""
    return {
        f"{_ROLLOUT}.do_sample": pick("do_sample", (*[True] * 9, False)),
        f"{_ROLLOUT}.temperature": pick("temperature", (1.0, 0.7, 1.3, 1.0, 0.7, 1.3, 1.0, 0.7, 1.3, 0.01)),
        f"{_ROLLOUT}.top_p": pick("top_p", (1.0, 1.0, 0.9)),
        f"{_ROLLOUT}.top_k": pick("top_k", (-1, -1, 20, -1, -1, 20, -1, -1, 20, 1)),
        f"{_ROLLOUT}.logprobs_mode": pick(
            "logprobs_mode", ("processed_logprobs", "processed_logprobs", "raw_logprobs")
        ),
    }


def _loss(pick: Pick[Any], sampled_raw: bool) -> dict[str, Any]:
    """The loss, the KL terms and the correction; what is sampled raw cannot be held against what is recomputed."""
    in_reward = pick("use_kl_in_reward", RARELY)
    chosen = {
        f"{_ACTOR}.loss_agg_mode": pick("loss_agg_mode", LOSS_MODES),
        f"{_ACTOR}.use_kl_loss": pick("use_kl_loss", BOTH),
        f"{_ACTOR}.kl_loss_type": pick("kl_loss_type", KL_TYPES),
        f"{_ACTOR}.entropy_coeff": pick("entropy_coeff", (0.0, 0.01)),
        f"{_ACTOR}.optim.lr": pick("lr", (1e-4, 3e-3, 1e-4, 3e-3, 1e-4, 3e-3, 0.1)),
        "algorithm.norm_adv_by_std_in_grpo": pick("norm_adv_by_std", (True, True, False)),
        "algorithm.use_kl_in_reward": in_reward,
    }
    if in_reward:
        chosen["algorithm.kl_penalty"] = pick("kl_penalty", ("kl", "abs", "mse", "low_var_kl"))
        chosen["algorithm.kl_ctrl.type"] = pick("kl_ctrl", ("fixed", "adaptive"))
        chosen["algorithm.kl_ctrl.kl_coef"] = 0.05
        chosen["algorithm.kl_ctrl.horizon"] = pick("kl_horizon", (10000, 20))
    if not sampled_raw:
        chosen |= _correction(pick("correction", CORRECTIONS), pick)
    return chosen


def _correction(kind: str, pick: Pick[Any]) -> dict[str, Any]:
    if kind == "bypass":
        return {f"{_CORRECTION}.bypass_mode": True}
    if kind.endswith("weights"):
        normalized = pick("normalized", BOTH)
        return {
            f"{_CORRECTION}.rollout_is": kind.partition("_")[0],
            f"{_CORRECTION}.rollout_is_batch_normalize": normalized,
        }
    if kind == "token_rejection":
        return {f"{_CORRECTION}.rollout_rs": "token_k1", f"{_CORRECTION}.rollout_rs_threshold": "0.5_2.0"}
    if kind == "sequence_rejection":
        return {f"{_CORRECTION}.rollout_rs": "seq_mean_k3", f"{_CORRECTION}.rollout_rs_threshold": 0.01}
    return {}


def _micro_batches(pick: Pick[Any]) -> dict[str, Any]:
    """How a mini-batch and a scoring pass are cut: by rows, by tokens, or not at all."""
    if pick("dynamic_batch", RARELY):
        budget = pick("max_token_len", (64, 200, 1000))
        return {
            f"{_ACTOR}.use_dynamic_bsz": True,
            f"{_ACTOR}.ppo_max_token_len_per_gpu": budget,
            f"{_ROLLOUT}.log_prob_use_dynamic_bsz": pick("rollout_dynamic", BOTH),
        }
    return {
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu": pick("micro_batch", (1, 2, 8, None)),
        f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": pick("log_prob_micro_batch", (1, 3, None)),
        f"{_REF}.log_prob_micro_batch_size_per_gpu": pick("ref_micro_batch", (2, None)),
    }


def _kept(pick: Pick[Any]) -> dict[str, Any]:
    """Validation, checkpoints and dumps, which stand beside training and may not touch it."""
    chosen: dict[str, Any] = {}
    if pick("validation", RARELY):
        samples = pick("val_do_sample", BOTH)
        chosen |= {
            "data.val_files": "builtin:add",
            "data.val_max_samples": pick("val_samples", (1, 3, -1)),
            "trainer.test_freq": pick("test_freq", (1, 2)),
            "trainer.val_before_train": pick("val_before_train", BOTH),
            f"{_ROLLOUT}.val_kwargs.n": pick("val_n", (1, 2)),
            f"{_ROLLOUT}.val_kwargs.do_sample": samples,
            f"{_ROLLOUT}.val_kwargs.temperature": 1.0 if samples else 0.0,
        }
    if pick("dump", RARELY):
        chosen["trainer.rollout_data_dir"] = "{folder}/dump"
    if pick("checkpoints", RARELY):
        chosen["trainer.save_freq"] = 1
    return chosen


def _typed(value: Any) -> str:
    """A value as it is typed in an override."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
