"""Rules of the rollout's engine: the mode, its model, and whose log-probs can be used."""

from __future__ import annotations

import pytest

from lineage.trainer.config import ConfigError, adapt_to_mode, compose, validate_config

VLLM = ("mode=ray", "rollout.name=vllm", "model.path=tiny_tied")


def test_the_default_model_is_replaced_by_one_that_is_served():
    """And one line says so; a model that was chosen is not touched, nor is any with the other engine."""
    config = compose(["mode=ray", "rollout.name=vllm"])
    (line,) = adapt_to_mode(config, ["mode=ray", "rollout.name=vllm"])
    assert line.startswith("replaced: actor_rollout_ref.model.path=tiny by tiny_tied: ")
    assert config.actor_rollout_ref.model.path == "tiny_tied"
    assert validate_config(config) == []
    for others in (["mode=ray"], ["mode=ray", "rollout.name=vllm", "model.path=smollm2"]):
        config = compose(others)
        before = config.actor_rollout_ref.model.path
        assert adapt_to_mode(config, others) == []
        assert config.actor_rollout_ref.model.path == before


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rollout.name=vllm"], "needs mode=ray"),
        (["rollout.num_replicas=2"], "needs actor_rollout_ref.rollout.name=vllm"),
        ([*VLLM, "rollout.num_replicas=0"], "num_replicas=0 must be greater than 0"),
        (
            [*VLLM, "rollout.tensor_model_parallel_size=2"],
            "take more of them by actor_rollout_ref.rollout.num_replicas",
        ),
        (
            [*VLLM, "rollout.top_p=0.9", "algorithm.rollout_correction.rollout_is=token"],
            "rollout_is=token with .*top_p",
        ),
        (
            [*VLLM, "rollout.top_k=5", "algorithm.rollout_correction.bypass_mode=true"],
            "bypass_mode=true with .*top_k=5",
        ),
        ([*VLLM, "rollout.name=sglang"], "sglang is not supported; use one of: hf, vllm"),
    ],
)
def test_what_the_engine_cannot_do_is_one_line(overrides, said):
    """It names the key, and what to set instead."""
    with pytest.raises(ConfigError, match=said) as caught:
        validate_config(compose(overrides))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("narrowed", ["rollout.top_p=0.9", "rollout.top_k=5"])
def test_log_probs_over_fewer_tokens_are_a_warning(narrowed):
    """Nothing uses them, but they are in the trace; raw ones, or none, or those of the other engine are no news."""
    (warning,) = validate_config(compose([*VLLM, narrowed]))
    assert "over the tokens that are left" in warning
    for quiet in (
        [*VLLM, narrowed, "rollout.logprobs_mode=raw_logprobs"],
        [*VLLM, narrowed, "rollout.calculate_log_probs=false"],
        ["mode=ray", narrowed],
    ):
        assert validate_config(compose(quiet)) == []
