"""Overrides are applied as Hydra applies them, though it composes only the defaults and the experiments."""

from __future__ import annotations

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lineage.trainer.config import ConfigError, compose, loggers, to_yaml


def by_hydra(*overrides):
    """What Hydra composes from the same overrides."""
    compose()  # the tree is in Hydra's store from the first composition on
    GlobalHydra.instance().clear()
    with hydra.initialize_config_module("lineage.trainer.config", version_base=None):
        return hydra.compose("ppo_trainer", list(overrides))


GOOD = (
    "trainer.seed=7",
    "data.seed=null",
    "data.train_batch_size=16",
    "trainer.nnodes='2'",
    "actor_rollout_ref.actor.optim.lr=1",
    "actor_rollout_ref.actor.optim.eps=1e-6",
    "actor_rollout_ref.actor.optim.betas=[0,0.95]",
    "actor_rollout_ref.actor.clip_ratio=inf",
    "data.shuffle=off",
    "data.filter_overlong_prompts='yes'",
    "trainer.balance_batch=0",
    "trainer.experiment_name=3.50",
    "trainer.project_name='a, b = \\'c\\' {d}: [e]'",
    "trainer.default_local_dir=a b\\,c",
    "trainer.device=",
    'data.train_files=[a.parquet,"b c.jsonl",null,1,true,${trainer.seed}]',
    "data.val_files={a:1,b:[x,{c:2}]}",
    "trainer.logger='console'",
    "actor_rollout_ref.model.target_modules=[q_proj,v_proj]",
    "algorithm.rollout_correction.rollout_rs_threshold=${actor_rollout_ref.rollout.temperature}",
    "data.val_max_samples=${trainer.seed}",
    "trainer.rollout_data_dir=${oc.env:HOME}/dump",
    "data.max_prompt_length=int(9.7)",
    "++trainer.save_freq=3",
    "++trainer.test_freq=${trainer.save_freq}",
    "++data.apply_chat_template_kwargs.enable_thinking=false",
    "++data.apply_chat_template_kwargs.inner.deep=[1,{k:v}]",
    "++actor_rollout_ref.model.override_config={rope:{type:linear},n:64}",
    "++actor_rollout_ref.model.override_config={n:65}",
    "trainer.val_only=true",
    "trainer.val_only=false",
)


@pytest.mark.parametrize("experiment", [(), ("+experiment=[merged_steps,failures]",)])
def test_overrides_give_what_hydra_gives(experiment):
    """Values of every kind are typed, merged and kept as Hydra does, with experiments and without."""
    ours, hydras = compose([*GOOD, *experiment]), by_hydra(*experiment, *GOOD)
    hydras.actor_rollout_ref.actor.ppo_mini_batch_size = ours.actor_rollout_ref.actor.ppo_mini_batch_size
    assert OmegaConf.to_yaml(ours) == OmegaConf.to_yaml(hydras)
    assert to_yaml(ours) == to_yaml(hydras)
    assert OmegaConf.is_struct(ours)


BAD = (
    "data.train_batch_size=abc",
    "trainer.seed=[1]",
    "trainer.experiment_name=null",
    "++data.apply_chat_template_kwargs=3",
    "trainer.project_name=${trainer.",
)
BAD_TOO = (
    "data.train_batch_size=null",
    "data.seed=1.5",
    "data.shuffle=maybe",
    "trainer.seed={a:1}",
    "trainer.experiment_name=[a]",
    "actor_rollout_ref.actor.optim.lr=fast",
    "actor_rollout_ref.actor.optim.betas=[a]",
    "actor_rollout_ref.actor.optim.betas=0.9",
    "++trainer.save_freq=often",
    "++data.apply_chat_template_kwargs=null",
    "data.val_files='${trainer.'",
)


@pytest.mark.parametrize("override", [*BAD, *(pytest.param(override, marks=pytest.mark.slow) for override in BAD_TOO)])
def test_bad_values_are_refused_as_hydra_refuses_them(override):
    """The line is the first of Hydra's own reason, after the key where it names one."""
    with pytest.raises(ConfigError) as caught:
        compose([override])
    with pytest.raises(Exception) as hydras:  # noqa: PT011
        by_hydra(override)
    inner = hydras.value.__cause__ or hydras.value.__context__
    reason = inner if isinstance(inner, OmegaConfBaseException) else hydras.value
    assert str(reason).splitlines()[0] in str(caught.value)
    assert "\n" not in str(caught.value)
    key = getattr(reason, "full_key", None)
    assert not key or str(caught.value).startswith(f"{key}: ")


@pytest.mark.parametrize(
    ("key", "inner"),
    [
        ("data.apply_chat_template_kwargs", "enable_thinking"),
        ("actor_rollout_ref.model.override_config", "max_position_embeddings"),
        ("model.override_config", "max_position_embeddings"),
        ("reward.custom_reward_function.reward_kwargs", "a"),
    ],
)
@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_a_map_is_set_whole_or_by_its_keys(key, inner, plus):
    """Free keys of a map are given in braces, or dotted, one by one; braces add to what is there."""
    full = key if not key.startswith("model.") else f"actor_rollout_ref.{key}"
    config = compose([f"{plus}{key}={{{inner}:64,b:{{c:x}}}}", f"{plus}{key}={{d:null}}", f"{plus}{key}.e.f=[1]"])
    expected = {inner: 64, "b": {"c": "x"}, "d": None, "e": {"f": [1]}}
    assert OmegaConf.to_container(OmegaConf.select(config, full)) == expected
    assert OmegaConf.select(compose([f"{plus}{key}.{inner}=false"]), f"{full}.{inner}") is False


def test_no_composition_sees_another(tmp_path):
    """What is done to a configuration, or to the file of an experiment, shows in that one alone."""
    first = compose(["data.apply_chat_template_kwargs={a:[1]}"])
    first.trainer.logger.append("wandb")
    first.data.apply_chat_template_kwargs.a.append(2)
    assert OmegaConf.to_container(compose(["data.apply_chat_template_kwargs={a:[1]}"]).data)[
        "apply_chat_template_kwargs"
    ] == {"a": [1]}
    assert loggers(compose()) == ["console", "jsonl"]
    own = tmp_path / "mine.yaml"
    for size in (2, 3):
        own.write_text(f"data: {{train_batch_size: {size}}}\n")
        assert compose([f"+experiment={own}"]).data.train_batch_size == size
