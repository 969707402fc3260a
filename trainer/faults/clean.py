"""Clean configurations, by name: on none of them may a code fail.

The lab's own, the nine experiments, the corners between them, and every configuration some fault is injected into: a
code that fails there without the fault would be caught by anything.
"""

from __future__ import annotations

from collections.abc import Mapping

from lineage.trainer.faults.registry import all_faults

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_CORRECTION = "algorithm.rollout_correction"
_ONE_TASK = ("data.train_files=builtin:add", "data.train_batch_size=24", "data.max_response_length=32")

#: overrides beyond the lab's, by the name of the configuration
NAMED: Mapping[str, tuple[str, ...]] = {
    "lab": (),
    "tools": ("+experiment=tools",),
    "multi_output": ("+experiment=multi_output",),
    "failures": ("+experiment=failures",),
    "lora_ref": ("+experiment=lora_ref",),
    "kl_in_reward": ("+experiment=kl_in_reward",),
    "bypass": ("+experiment=bypass",),
    "dynamic_batch": ("+experiment=dynamic_batch",),
    "merged_steps": ("+experiment=merged_steps", "data.train_batch_size=4"),
    "reward_colocated": ("+experiment=reward_colocated",),
    "two_epochs_shuffled": (f"{_ACTOR}.ppo_epochs=2", f"{_ACTOR}.shuffle=true", "trainer.total_training_steps=3"),
    "no_padding": ("data.train_batch_size=4",),
    "one_rank": ("trainer.n_gpus_per_node=1",),
    "four_ranks": ("trainer.n_gpus_per_node=4", "data.train_batch_size=5"),
    "sequence_mean_of_token_means": (
        f"{_ACTOR}.loss_agg_mode=seq-mean-token-mean",
        f"{_ACTOR}.use_kl_loss=true",
        f"{_ACTOR}.entropy_coeff=0.01",
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu=1",
    ),
    "sequence_mean_of_token_sums": (
        f"{_ACTOR}.loss_agg_mode=seq-mean-token-sum",
        f"{_ACTOR}.use_kl_loss=true",
        f"{_ACTOR}.kl_loss_type=mse",
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu=1",
    ),
    "rollout_correction": (
        f"{_CORRECTION}.rollout_is=token",
        f"{_CORRECTION}.rollout_rs=token_k1",
        f"{_CORRECTION}.rollout_rs_threshold=0.5_2.0",
    ),
    "centred_only": (
        "algorithm.norm_adv_by_std_in_grpo=false",
        f"{_ROLLOUT}.temperature=0.7",
        f"{_ROLLOUT}.top_p=0.9",
    ),
    "validated_saved_dumped": (
        "data.val_files=builtin:add",
        "data.val_max_samples=3",
        "trainer.test_freq=1",
        "trainer.val_before_train=true",
        "trainer.rollout_data_dir={folder}/dump",
        "trainer.save_freq=1",
    ),
    # the prompts of builtin:add are few, and come again: greedy answers to one prompt are alike
    "validated_greedily": (
        "data.val_files=builtin:add",
        "data.max_response_length=32",
        "trainer.val_before_train=true",
        f"{_ROLLOUT}.val_kwargs.n=2",
        "trainer.total_training_steps=1",
    ),
    "greedy": (*_ONE_TASK, f"{_ROLLOUT}.do_sample=false"),
    "top_one_with_raw_log_probs": (*_ONE_TASK, f"{_ROLLOUT}.top_k=1", f"{_ROLLOUT}.logprobs_mode=raw_logprobs"),
    "low_temperature": (*_ONE_TASK, f"{_ROLLOUT}.temperature=0.01"),
    "low_temperature_with_raw_log_probs": (
        *_ONE_TASK,
        f"{_ROLLOUT}.temperature=0.01",
        f"{_ROLLOUT}.logprobs_mode=raw_logprobs",
    ),
    # a policy that is thrown far from the old one and from the reference, and collapses
    "great_learning_rate": (
        f"{_ACTOR}.optim.lr=0.1",
        f"{_ACTOR}.ppo_epochs=2",
        f"{_ACTOR}.use_kl_loss=true",
        "data.max_response_length=128",
        "trainer.total_training_steps=3",
    ),
    "great_learning_rate_low_temperature": (
        f"{_ACTOR}.optim.lr=0.1",
        f"{_ACTOR}.ppo_epochs=2",
        f"{_ROLLOUT}.temperature=0.01",
        "trainer.total_training_steps=3",
    ),
    "small_learning_rate": (f"{_ACTOR}.optim.lr=1e-3",),
    "one_session": (f"{_ROLLOUT}.n=1",),
    "micro_batches_of_one": (f"{_ACTOR}.ppo_micro_batch_size_per_gpu=1", "trainer.total_training_steps=4"),
    "tools_two_epochs_four_ranks": ("+experiment=tools", f"{_ACTOR}.ppo_epochs=2", "trainer.n_gpus_per_node=4"),
    "multi_output_four_ranks": (
        "+experiment=multi_output",
        "trainer.n_gpus_per_node=4",
        f"{_ACTOR}.use_kl_loss=true",
    ),
}

#: the same of runs between processes
ON_RAY: Mapping[str, tuple[str, ...]] = {
    "two_ranks_on_ray": ("mode=ray", "trainer.n_gpus_per_node=2"),
    "four_ranks_on_ray": ("mode=ray", "trainer.n_gpus_per_node=4", "data.train_batch_size=5", "+experiment=tools"),
    "vllm_on_ray": ("mode=ray", "trainer.n_gpus_per_node=2", "rollout.name=vllm"),
}


def clean_configurations() -> dict[str, tuple[str, ...]]:
    """Every clean configuration: the named ones, then those of the faults, each once."""
    known = {overrides: name for name, overrides in NAMED.items()}
    for fault in all_faults().values():
        known.setdefault(fault.overrides, f"without {fault.name}")
    return {name: overrides for overrides, name in known.items()}
