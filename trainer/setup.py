"""Building the parts of the embedded trainer, in verl's order of initialisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import OmegaConf

from lineage import hooks
from lineage.hooks import UserError, Weights
from lineage.trainer.actor import ActorRolloutRefWorker, resident_copy
from lineage.trainer.agent_loop import AgentLoopManager, AgentLoopWorker, LoopContext, agent_loop
from lineage.trainer.config import need_reference_policy
from lineage.trainer.dataset import RLHFDataset, make_dataloader
from lineage.trainer.engine.topology import topology_of
from lineage.trainer.models import eos_token_ids, find_model, load_model, load_tokenizer
from lineage.trainer.prompts import PromptStream
from lineage.trainer.queue import LocalTransferQueue
from lineage.trainer.replay_buffer import ReplayBuffer
from lineage.trainer.reward import RewardLoopWorker, reward_manager
from lineage.trainer.rollout.base import RolloutEngine
from lineage.trainer.rollout.hf import HFRollout
from lineage.trainer.weight_sync import CheckpointEngineManager


@dataclass
class Parts:
    """Everything a trainer is made of.

    Attributes:
        prompt_length, response_length: limits in tokens.
        eos_token_ids: ids that end a response, the first one fills padding rows.
        with_reference: a frozen reference policy exists.
    """

    tokenizer: Any
    stream: PromptStream
    queue: Any
    worker: ActorRolloutRefWorker
    rollout: RolloutEngine
    reward: RewardLoopWorker
    replay_buffer: ReplayBuffer
    checkpoint_manager: CheckpointEngineManager
    total_training_steps: int
    prompt_length: int
    response_length: int
    eos_token_ids: list[int]
    with_reference: bool


def build_parts(config: Any, queue: Any = None) -> Parts:
    """Tokenizer, dataloader, actor and reference, reward loop, rollout, weight sync; records the ``init`` rows.

    Args:
        config: resolved configuration.
        queue: TransferQueue's interface; None makes the in-process store.
    """
    trainer, data = config.trainer, config.data
    model, rollout_config = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    torch.manual_seed(trainer.seed)  # nothing here draws from it; a model with dropout would
    source = find_model(model.path, model.tokenizer_path)
    tokenizer = load_tokenizer(source, trust_remote_code=model.trust_remote_code)
    seed = trainer.seed if data.seed is None else data.seed
    dataset = RLHFDataset(data.train_files, tokenizer, data, seed=seed, max_samples=data.train_max_samples)
    dataloader = make_dataloader(dataset, batch_size=data.train_batch_size, shuffle=data.shuffle, seed=seed)
    steps = trainer.total_training_steps or trainer.total_epochs * len(dataloader)
    module = load_model(
        source,
        dtype=config.actor_rollout_ref.actor.fsdp_config.model_dtype,
        device=device_of(trainer.device),
        trust_remote_code=model.trust_remote_code,
        override_config=OmegaConf.to_container(model.override_config),
    )
    use_few_threads(module)
    ends = eos_token_ids(module, tokenizer)
    traced_queue = hooks.trace_queue(queue if queue is not None else LocalTransferQueue())
    topology = topology_of(config)
    with_reference = need_reference_policy(config)
    worker = ActorRolloutRefWorker(
        traced_queue,
        module,
        config.actor_rollout_ref,
        topology,
        total_training_steps=steps,
        pad_token_id=tokenizer.pad_token_id,
        with_reference=with_reference,
    )
    record_init(worker)
    rollout = HFRollout(
        resident_copy(module),
        eos_token_ids=ends,
        pad_token_id=tokenizer.pad_token_id,
        max_num_seqs=rollout_config.max_num_seqs,
    )
    return Parts(
        tokenizer=tokenizer,
        stream=PromptStream(dataloader, trainer.seed),
        queue=traced_queue,
        worker=worker,
        rollout=rollout,
        reward=RewardLoopWorker(reward_manager(config.reward, tokenizer)),
        replay_buffer=ReplayBuffer(traced_queue),
        checkpoint_manager=CheckpointEngineManager(worker, [rollout], record_weights=config.trace.weights),
        total_training_steps=steps,
        prompt_length=rollout_config.prompt_length or data.max_prompt_length,
        response_length=rollout_config.response_length or data.max_response_length,
        eos_token_ids=ends,
        with_reference=with_reference,
    )


def record_init(worker: ActorRolloutRefWorker) -> None:
    """Rows of the ``init`` stage: the first weights of actor and reference, and the topology."""
    stage = hooks.current()
    if not hooks.recorder().enabled:
        return
    training = worker.actor.module.training
    stage.params("produce", dict(worker.state_dict()), weights=Weights(0, "actor", training=training))
    if worker.reference is not None:
        weights = Weights(0, "ref", training=worker.reference.training)
        stage.params("produce", dict(worker.reference.state_dict()), weights=weights)
    stage.event("produce", "topology", topology=worker.topology)


def build_agent_loop_manager(config: Any, parts: Parts) -> AgentLoopManager:
    """Agent-loop workers over the built parts (verl ``init_agent_loop_manager``)."""
    agent = config.actor_rollout_ref.rollout.agent
    agent_loop(agent.default_agent_loop)  # an unknown name is a mistake to report now, not in the first session
    context = LoopContext(
        rollout=parts.rollout,
        tokenizer=parts.tokenizer,
        prompt_length=parts.prompt_length,
        response_length=parts.response_length,
        truncation=config.data.truncation,
        template_kwargs=OmegaConf.to_container(config.data.apply_chat_template_kwargs),
        calculate_log_probs=config.actor_rollout_ref.rollout.calculate_log_probs,
    )
    return AgentLoopManager(
        [
            AgentLoopWorker(
                parts.queue,
                context,
                parts.reward,
                default_agent_loop=agent.default_agent_loop,
                seed=config.trainer.seed,
            )
            for _ in range(agent.num_workers)
        ]
    )


# Parameters below which one thread is faster: operators this small cost less than waking a second core for them
# (tiny model on a busy machine of 2 cores: 53 ms a decoded token with two threads, 4 ms with one).
SMALL_MODEL = 4_000_000


def use_few_threads(module: torch.nn.Module) -> None:
    """Compute a small model on one thread of the CPU."""
    if sum(parameter.numel() for parameter in module.parameters()) < SMALL_MODEL:
        torch.set_num_threads(1)


def device_of(name: str) -> str:
    """``trainer.device``: ``auto`` takes CUDA when there is one.

    Raises:
        UserError: a CUDA device where this torch sees none.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"trainer.device={name}: torch sees no CUDA device here; take trainer.device=auto or cpu")
    return name
