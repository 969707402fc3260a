"""The configuration: verl's names in, one resolved tree out, every mistake one clear line."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import resources

import pytest
from omegaconf import OmegaConf

from lineage.cli.run import EXPERIMENTS
from lineage.hooks import UserError
from lineage.trainer.config import (
    ConfigError,
    adapt_to_mode,
    compose,
    experiments,
    keys,
    loggers,
    need_reference_policy,
    overridden,
    save,
    to_yaml,
    validate_config,
)

# what the seed says run_qwen3_4b_fsdp.sh sets
SCRIPT = [
    "algorithm.adv_estimator=grpo",
    "algorithm.use_kl_in_reward=False",
    "data.train_batch_size=16",
    "data.max_prompt_length=512",
    "data.max_response_length=1024",
    "data.filter_overlong_prompts=True",
    "data.truncation='error'",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.fsdp_config.param_offload=False",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=False",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.rollout.free_cache_engine=True",
    "actor_rollout_ref.ref.fsdp_config.param_offload=True",
]


def test_default_is_valid_and_small():
    """The configuration without overrides validates without a warning and trains three steps."""
    config = compose()
    assert validate_config(config) == []
    assert config.trainer.total_training_steps == 3
    assert need_reference_policy(config)


def test_every_override_of_the_script_is_accepted():
    """Each override the seed names is taken by its verl name and lands in the tree or is said to have no meaning."""
    config = compose([*SCRIPT, "mode=ray"])
    lines = adapt_to_mode(config, SCRIPT)
    validate_config(config)
    assert config.actor_rollout_ref.rollout.n == 8
    assert config.data.truncation == "error"
    assert [line.partition(":")[0] for line in lines] == ["replaced"]
    assert config.actor_rollout_ref.model.path == "tiny_tied"


def test_what_needs_processes_is_said_to_have_no_meaning_without():
    """A key of the ranks, and one of the engine that was not chosen, each by what it lacks."""
    typed = ["actor_rollout_ref.ref.fsdp_config.param_offload=True", "rollout.enforce_eager=true"]
    lines = adapt_to_mode(compose(typed), typed)
    assert lines == [
        "ignored: actor_rollout_ref.ref.fsdp_config.param_offload=true has no meaning in mode=embedded",
        "ignored: actor_rollout_ref.rollout.enforce_eager=true has no meaning with rollout.name=hf",
    ]
    with_vllm = ["mode=ray", "rollout.name=vllm", "model.path=tiny_tied", *typed]
    assert adapt_to_mode(compose(with_vllm), with_vllm) == []


def test_replaced_values_say_what_runs():
    """The resolved configuration names the engine that really generates, not the one that was asked for."""
    config = compose(["rollout.name=sglang"])
    adapt_to_mode(config, ["rollout.name=sglang"])
    assert config.actor_rollout_ref.rollout.name == "hf"


def test_a_default_typed_out_is_not_mentioned():
    """A key without meaning set to its default is no news."""
    override = ["actor_rollout_ref.rollout.tensor_model_parallel_size=1"]
    assert adapt_to_mode(compose(override), override) == []


@pytest.mark.parametrize("name", ["model.path", "actor_rollout_ref.model.path"])
def test_shortcut_and_full_name_are_one_key(name):
    """model.path is actor_rollout_ref.model.path."""
    assert compose([f"{name}=smollm2"]).actor_rollout_ref.model.path == "smollm2"


def test_hydra_grammar_is_kept():
    """Lists, quotes, null and free keys of a map read as Hydra reads them; the last of two overrides wins."""
    config = compose(
        [
            'trainer.logger=\'["console","jsonl"]\'',
            "actor_rollout_ref.actor.optim.betas=[0.8,0.9]",
            "data.seed=null",
            "data.apply_chat_template_kwargs.enable_thinking=false",
            "trainer.seed=1",
            "trainer.seed=2",
        ]
    )
    assert OmegaConf.to_container(config.actor_rollout_ref.actor.optim.betas) == [0.8, 0.9]
    assert config.data.apply_chat_template_kwargs.enable_thinking is False
    assert (config.data.seed, config.trainer.seed) == (None, 2)


def test_one_logger_or_several():
    """trainer.logger takes one name or a list, as verl does."""
    assert loggers(compose(["trainer.logger=console"])) == ["console"]
    assert loggers(compose(["trainer.logger=[console,jsonl]"])) == ["console", "jsonl"]


def test_epochs_alone_lift_the_step_limit():
    """total_epochs without total_training_steps runs whole epochs."""
    assert compose(["trainer.total_epochs=2"]).trainer.total_training_steps is None
    both = compose(["trainer.total_epochs=2", "trainer.total_training_steps=5"])
    assert both.trainer.total_training_steps == 5


def test_the_default_mini_batch_follows_a_smaller_batch():
    """A batch smaller than the default mini-batch is one mini-batch; a mini-batch that was typed is not touched."""
    config = compose(["data.train_batch_size=2"])
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 2
    assert validate_config(config) == []
    typed = compose(["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=4"])
    assert typed.actor_rollout_ref.actor.ppo_mini_batch_size == 4


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.train_batch=3", "data.train_batch_size"),
        ("actor.ppo_epochs=2", "actor_rollout_ref.actor.ppo_epochs"),
        ("lr=3", "actor_rollout_ref.actor.optim.lr"),
        ("rollout.temprature=1", "actor_rollout_ref.rollout.temperature"),
        ("+data.train_filez=x", "data.train_files"),
        ("nothing.like.it=1", "--cfg job"),
        ("data=3", "data.train_files"),
        ("data.seed=1,2", "data.seed=[a,b]"),
        ("~data.seed", "cannot be deleted"),
        ("train", "not key=value"),
        ("data.train_batch_size=abc", "data.train_batch_size: Value 'abc'"),
        ("trainer.save_freq=1.5", "trainer.save_freq: Value '1.5'"),
    ],
)
def test_bad_override_is_one_line(override, expected):
    """A bad override is a user's error of one line with the nearest valid name or the reason."""
    with pytest.raises(ConfigError) as caught:
        compose([override])
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, UserError)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("mode=spark", "mode=spark is not supported; use one of: embedded, ray"),
        ("algorithm.adv_estimator=gae", "use one of: grpo"),
        ("algorithm.kl_ctrl.type=linear", "use one of: fixed, adaptive"),
        ("trace.capture_text=true", "keeps no text"),
        ("rollout.name=trtllm", "use one of: hf"),
        ("actor_rollout_ref.actor.loss_agg_mode=mean", "token-mean, seq-mean-token-sum, seq-mean-token-mean"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=9", "greater than data.train_batch_size=8"),
        ("data.train_batch_size=0", "data.train_batch_size=0 must be greater than 0"),
        ("rollout.n=-1", "must be greater than 0"),
        ("data.truncation=cut", "error, left, right, middle"),
        ("trainer.n_gpus_per_node=3", "does not divide over 3"),
        ("rollout.temperature=0", "must be greater than 0"),
        ("rollout.top_p=1.5", "(0, 1]"),
        ("rollout.top_k=0", "-1 (all tokens)"),
        ("trainer.logger=[console,swanlab]", "unknown swanlab; known: console, jsonl"),
        ("trainer.resume_mode=latest", "use one of: disable, auto, resume_path"),
        ("trainer.device=tpu", "auto, cpu, cuda"),
        ("actor_rollout_ref.actor.optim.betas=[0.9]", "two numbers"),
        ("actor_rollout_ref.actor.clip_ratio=-0.1", "must not be negative"),
        ("actor_rollout_ref.actor.clip_ratio_c=1.0", "greater than 1"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=0", "must be greater than 0"),
    ],
)
def test_what_cannot_run_is_refused(override, expected):
    """A value this version cannot honour is one line that names the key and what is supported."""
    with pytest.raises(ConfigError) as caught:
        validate_config(compose([override]))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_steps_of_several_processes_are_not_judged_one_by_one():
    """What judges a step as it is sealed sees the rows of one process."""
    with pytest.raises(ConfigError, match="judges the rows of one process, and mode=ray has several"):
        validate_config(compose(["mode=ray", "trainer.lineage.on_violation=raise"]))


@pytest.mark.parametrize("size", [0, -2, 3])
def test_a_shard_size_that_does_not_divide_the_ranks_is_refused_where_it_is_used(size):
    """With ``mode=ray``; all ranks (-1, or more than there are) and a divisor of them are fine."""
    key = "actor_rollout_ref.actor.fsdp_config.fsdp_size"
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)}={size} does not divide 4 ranks: [^\n]*$"):
        validate_config(compose(["mode=ray", "trainer.n_ranks=4", f"{key}={size}"]))
    validate_config(compose(["trainer.n_ranks=4", f"{key}={size}"]))
    for fits in (-1, 1, 2, 4, 8):
        validate_config(compose(["mode=ray", "trainer.n_ranks=4", f"{key}={fits}"]))


def test_ranks_are_short_for_devices_of_one_node():
    """``trainer.n_ranks`` sets the two sizes it is short for, and is not set beside them."""
    trainer = compose(["trainer.n_ranks=4"]).trainer
    assert (trainer.nnodes, trainer.n_gpus_per_node) == (1, 4)
    with pytest.raises(ConfigError, match="set either, not both"):
        compose(["trainer.n_ranks=4", "trainer.n_gpus_per_node=2"])


def test_what_only_processes_hear_is_said_where_there_is_one():
    """A key of ``mode=ray`` is mentioned as having no meaning in embedded mode, and is used by the other."""
    typed = ["reward.num_workers=2"]
    assert adapt_to_mode(compose(typed), typed) == ["ignored: reward.num_workers=2 has no meaning in mode=embedded"]
    assert adapt_to_mode(compose([*typed, "mode=ray"]), typed) == []


def test_both_names_of_the_sequence_parallel_size_are_one():
    """verl's actor has it and the actor's engine; either sets both, and they may not differ."""
    actor, size = "actor_rollout_ref.actor", "ulysses_sequence_parallel_size"
    for typed in (f"{actor}.{size}=2", f"{actor}.fsdp_config.{size}=2"):
        config = compose(["mode=ray", typed]).actor_rollout_ref.actor
        assert (config[size], config.fsdp_config[size]) == (2, 2)
        (line,) = adapt_to_mode(compose([typed]), [typed])
        assert line == f"ignored: {typed} has no meaning in mode=embedded"
    with pytest.raises(ConfigError, match="set either, not both"):
        compose([f"{actor}.{size}=2", f"{actor}.fsdp_config.{size}=4"])


def test_the_batch_is_dealt_over_replicas():
    """The sequence-parallel size divides the ranks, and a mini-batch has to divide over what is left of them."""
    shared = ["mode=ray", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", "actor_rollout_ref.rollout.n=1"]
    assert validate_config(compose([*shared, "trainer.n_ranks=8"])) == []
    with pytest.raises(ConfigError, match="world size 3 does not divide by ulysses_sequence_parallel_size=2"):
        validate_config(compose([*shared, "trainer.n_ranks=3"]))
    with pytest.raises(ConfigError, match=r"= 4 does not divide over 8 .*nnodes / ulysses_sequence_parallel_size"):
        validate_config(compose([*shared, "trainer.n_ranks=16"]))


def test_processes_enough_record_by_themselves():
    """With ``mode=ray`` a recorder of its own process is there only where it is asked for."""
    assert compose([]).trace.sidecar
    assert not compose(["mode=ray"]).trace.sidecar
    assert compose(["mode=ray", "trace.sidecar=true"]).trace.sidecar


def test_a_batch_that_does_not_divide_is_padded_and_said():
    """B % M != 0 is allowed: the balance stage pads, and one warning gives the rows."""
    config = compose(["data.train_batch_size=6", "actor_rollout_ref.actor.ppo_mini_batch_size=4"])
    (line,) = validate_config(config)
    assert "padded from 24 to 32 rows" in line


def test_no_reference_without_a_kl():
    """The reference policy is needed only when a KL is on."""
    assert not need_reference_policy(compose(["actor_rollout_ref.actor.use_kl_loss=false"]))


@pytest.mark.parametrize("name", experiments.names())
def test_every_experiment_composes_and_validates(name):
    """Each named experiment is a valid configuration, and its file says what it shows."""
    validate_config(compose([f"+experiment={name}"]))
    text = (resources.files("lineage.trainer.config") / "experiment" / f"{name}.yaml").read_text("utf-8")
    assert re.match(r"# @package _global_\n# .+\n# Look at .+\n\w+:", text)


def test_help_lists_the_experiments_there_are():
    """lineage run --help names every experiment file, and no other."""
    assert list(EXPERIMENTS) == experiments.names()


@pytest.mark.parametrize(
    "overrides",
    [
        ["+experiment=merged_steps", "rollout.n=3", "data.seed=1"],
        ["rollout.n=3", "data.seed=1", "+experiment=merged_steps"],
    ],
)
def test_an_experiment_stands_anywhere_and_typed_keys_win(overrides):
    """Position among the overrides is free; a key typed beside an experiment that sets it keeps its value."""
    config = compose(overrides)
    assert config.trainer.v1.sync.parameter_sync_step == 2
    assert (config.actor_rollout_ref.rollout.n, config.data.seed) == (3, 1)


def test_several_experiments_are_applied_in_their_order(tmp_path):
    """A list of experiments, or two of them, is one configuration; of a key both set, the last one's value stays."""
    own = tmp_path / "last.yaml"
    own.write_text("data: {train_batch_size: 3}\n")
    both = compose([f"+experiment=[merged_steps,{own}]"])
    assert (both.data.train_batch_size, both.trainer.v1.sync.parameter_sync_step) == (3, 2)
    assert both == compose(["experiment=merged_steps", f"+experiment={own}"])


def test_keys_of_an_experiment_count_as_typed(tmp_path):
    """overridden() names them, first; the rules that look at what was typed take them for typed."""
    own = tmp_path / "mine.yaml"
    own.write_text(
        "data: {train_batch_size: 2}\ntrainer: {total_epochs: 2}\nactor_rollout_ref: {actor: {strategy: fsdp}}\n"
        "reward: {custom_reward_function: {reward_kwargs: {scale: 2}}}\n"
    )
    overrides = ["model.path=tiny", f"+experiment={own}"]
    assert overridden(overrides) == [
        "data.train_batch_size",
        "trainer.total_epochs",
        "actor_rollout_ref.actor.strategy",
        "reward.custom_reward_function.reward_kwargs.scale",
        "actor_rollout_ref.model.path",
    ]
    config = compose(overrides)
    assert config.trainer.total_training_steps is None
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 2
    assert adapt_to_mode(config, overrides) == [
        "ignored: actor_rollout_ref.actor.strategy=fsdp has no meaning in mode=embedded"
    ]
    own.write_text("data: {train_batch_size: 2}\nactor_rollout_ref: {actor: {ppo_mini_batch_size: 4}}\n")
    assert compose([f"+experiment={own}"]).actor_rollout_ref.actor.ppo_mini_batch_size == 4


def test_an_experiment_can_build_on_another(tmp_path):
    """The defaults list of a user's file is Hydra's: its keys come on top of those of the experiment it names."""
    own = tmp_path / "mine.yaml"
    own.write_text("defaults: [merged_steps, _self_]\ndata: {train_batch_size: 16}\n")
    config = compose([f"+experiment={own}"])
    assert (config.data.train_batch_size, config.trainer.v1.sync.parameter_sync_step) == (16, 2)
    assert "trainer.v1.sync.parameter_sync_step" in overridden([f"+experiment={own}"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data: {train_batch: 2}", "data.train_batch_size"),
        ("data: 3", "names a whole section"),
        ("data: {train_batch_size: many}", "data.train_batch_size: Value 'many'"),
        ("- a list", "not a mapping"),
        ("data: {train_batch_size: 2", "not YAML"),
        ("defaults: [nowhere]", "nowhere"),
        (None, "cannot read the file: No such file"),
    ],
)
def test_a_bad_experiment_file_is_one_line(tmp_path, text, expected):
    """A user's file with a mistake is one line that names the file or the key."""
    own = tmp_path / "mine.yaml"
    if text is not None:
        own.write_text(text)
    with pytest.raises(ConfigError) as caught:
        compose([f"+experiment={own}"])
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("word", "meant"), [("tool", "did you mean tools? "), ("zzzz", "")])
def test_an_unknown_experiment_names_those_there_are(word, meant):
    """One line with the nearest name, when one is near, and the list."""
    with pytest.raises(ConfigError) as caught:
        compose([f"+experiment={word}"])
    assert f"no such experiment{':' if meant else ';'} {meant}there are {', '.join(experiments.names())}" in str(
        caught.value
    )


def test_saved_yaml_reads_back(tmp_path):
    """The file beside the trace is the resolved configuration."""
    config = compose(["trainer.seed=7"])
    path = save(config, tmp_path)
    assert OmegaConf.load(path) == OmegaConf.create(to_yaml(config))
    assert OmegaConf.load(path).trainer.seed == 7


def test_every_key_can_be_overridden():
    """Each key of the tree, typed out with its own default, composes to the default configuration."""
    plain = [(name, default) for name, default, _ in keys() if isinstance(default, int | float | bool)]
    assert len(plain) > 60
    overrides = [f"{name}={default}" for name, default in plain if name != "trainer.total_epochs"]
    assert compose(overrides) == compose()


def test_compose_writes_nothing_and_imports_no_torch(tmp_path):
    """Composing leaves no outputs/ folder behind and needs no torch."""
    code = "import sys; from lineage.trainer.config import compose; compose(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=60)
    assert list(tmp_path.iterdir()) == []
