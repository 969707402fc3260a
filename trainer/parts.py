"""What a trainer is made of, whatever the mode: the parts themselves, and how they are put together."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lineage.trainer.checkpoint import Stateful
from lineage.trainer.config import need_reference_policy
from lineage.trainer.kl_control import AdaptiveKLController, KLController, kl_controller
from lineage.trainer.models import ModelFacts
from lineage.trainer.prompts import PromptStream, ValidationPrompts
from lineage.trainer.protocol import KVBatchMeta
from lineage.trainer.replay_buffer import ReplayBuffer
from lineage.trainer.reward import RewardLoopManager


class Worker(Protocol):
    """Actor and reference as the stages ask them: one engine in this process, or a group of ranks."""

    def get_data_parallel_size(self) -> int:
        """Logical data-parallel size the engine reports."""
        ...

    def compute_log_prob(self, batch: KVBatchMeta) -> None:
        """Write ``log_probs`` and ``entropy`` of the actor, at full sequence length."""
        ...

    def compute_ref_log_prob(self, batch: KVBatchMeta) -> None:
        """Write ``log_probs`` of the reference at full sequence length, over the actor's."""
        ...

    def update_actor(self, batch: KVBatchMeta) -> dict[str, float]:
        """Train on a batch; ``extra_info`` holds the plan. Returns ``actor/*`` metrics."""
        ...

    def save_checkpoint(self, folder: Path) -> None:
        """Write model, optimiser and schedule to a folder that is there."""
        ...

    def load_checkpoint(self, folder: Path, global_steps: int) -> int:
        """Go on from such a folder, saved after that step; the optimiser's steps by what was saved."""
        ...


class WeightSync(Protocol):
    """What carries the weights from the actor to the rollout."""

    def sleep_replicas(self) -> None:
        """Stop generation: no request is admitted until the next sync has ended."""
        ...

    def update_weights(self, global_steps: int) -> None:
        """Give the actor's weights to the rollout as version ``global_steps`` and wake it."""
        ...


@dataclass(frozen=True)
class Prompts:
    """The two streams of prompts, and how long the training takes.

    Attributes:
        stream: prompts of the training.
        validation: prompts of the validation; None without ``data.val_files``.
        total_training_steps: steps of the run.
    """

    stream: PromptStream
    validation: ValidationPrompts | None
    total_training_steps: int


@dataclass
class Parts:
    """Everything a trainer is made of.

    Attributes:
        config: the resolved configuration they were made by.
        stream: prompts of the training.
        validation: prompts of the validation; None without ``data.val_files``.
        prompt_length, response_length: limits in tokens.
        vocab_size: token ids of the model lie below it.
        eos_token_ids: ids that end a response, the first one fills padding rows.
        with_reference: a reference policy exists.
        kl_controller: coefficient of the KL in the reward; unused without ``algorithm.use_kl_in_reward``.
        stateful: what else a checkpoint keeps, by name: things with ``state_dict`` and ``load_state_dict``.
    """

    config: Any
    tokenizer: Any
    stream: PromptStream
    validation: ValidationPrompts | None
    queue: Any
    worker: Worker
    rollout: Any
    reward: RewardLoopManager
    replay_buffer: ReplayBuffer
    checkpoint_manager: WeightSync
    total_training_steps: int
    prompt_length: int
    response_length: int
    vocab_size: int
    eos_token_ids: list[int]
    with_reference: bool
    kl_controller: KLController
    stateful: dict[str, Stateful] = field(default_factory=dict)


def make_parts(
    config: Any,
    tokenizer: Any,
    prompts: Prompts,
    facts: ModelFacts,
    *,
    queue: Any,
    worker: Worker,
    rollout: Any,
    reward: RewardLoopManager,
    replay_buffer: ReplayBuffer,
    checkpoint_manager: WeightSync,
) -> Parts:
    """Everything a trainer is made of, of the parts that differ by mode and those that do not."""
    controller = kl_controller(config.algorithm.kl_ctrl)
    return Parts(
        config=config,
        tokenizer=tokenizer,
        stream=prompts.stream,
        validation=prompts.validation,
        queue=queue,
        worker=worker,
        rollout=rollout,
        reward=reward,
        replay_buffer=replay_buffer,
        checkpoint_manager=checkpoint_manager,
        total_training_steps=prompts.total_training_steps,
        prompt_length=prompt_length(config),
        response_length=response_length(config),
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        with_reference=need_reference_policy(config),
        kl_controller=controller,
        stateful=(
            {"kl_ctrl": controller}
            if config.algorithm.use_kl_in_reward and isinstance(controller, AdaptiveKLController)
            else {}
        ),
    )


def prompt_length(config: Any) -> int:
    """Most tokens of a prompt."""
    return int(config.actor_rollout_ref.rollout.prompt_length or config.data.max_prompt_length)


def response_length(config: Any) -> int:
    """Most tokens of a response."""
    return int(config.actor_rollout_ref.rollout.response_length or config.data.max_response_length)
