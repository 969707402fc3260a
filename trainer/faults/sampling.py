"""Faults of how tokens are drawn: by parameters that are not the configuration's, or that have no effect."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from lineage.trainer.faults.registry import Seams, fault
from lineage.trainer.rollout.base import SamplingParams
from lineage.trainer.stages.prompts import sampling_params

TRUNCATE = "lineage.trainer.rollout.sampling.truncate"
VALIDATED = ("data.val_files=builtin:add", "data.val_max_samples=3", "trainer.test_freq=1")


@fault("LGP005", "rollout", *VALIDATED)
def validation_samples_like_training() -> Seams:
    """A validation is asked with the parameters of the training: val_kwargs are never read, and its score is noise."""
    return {"lineage.trainer.stages.prompts.validation_sampling_params": lambda _, config: sampling_params(config)}


@fault("LGP005", "rollout", *VALIDATED, "actor_rollout_ref.rollout.val_kwargs.top_k=3", "trainer.val_before_train=true")
def greedy_is_lost_on_the_way() -> Seams:
    """The engine is told the temperature of a validation, and not that it is to take the likeliest token."""

    def draw(original: Any, logits: Tensor, params: SamplingParams, uniform: Tensor) -> Any:
        return original(logits, replace(params, do_sample=True, temperature=1.0) if params.greedy else params, uniform)

    return {"lineage.trainer.rollout.sampling.draw": draw}


@fault("LGP005", "rollout", "actor_rollout_ref.rollout.top_p=0.9")
def the_engines_own_defaults() -> Seams:
    """A request that names no nucleus gets the engine's own default: the configuration's was not handed on."""

    async def generate(original: Any, engine: Any, request_id: str, **options: Any) -> Any:
        options["sampling_params"] = replace(options["sampling_params"], top_p=0.8, top_k=20)
        return await original(engine, request_id, **options)

    return {"lineage.trainer.rollout.hf.HFRollout.generate": generate}


@fault("LGP005", "rollout", "actor_rollout_ref.rollout.top_k=2")
def top_k_has_no_effect() -> Seams:
    """The sampler takes top_k and does nothing with it: any token of the vocabulary can be drawn."""
    return {TRUNCATE: lambda _, logits, __: logits}


@fault(
    "LGP005", "rollout", "actor_rollout_ref.rollout.top_p=0.5", "actor_rollout_ref.rollout.logprobs_mode=raw_logprobs"
)
def the_nucleus_has_no_effect() -> Seams:
    """A faster kernel serves top_k alone: requests with top_p are drawn from the whole vocabulary."""
    return {TRUNCATE: lambda original, logits, params: original(logits, replace(params, top_p=1.0))}
