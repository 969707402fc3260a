"""Building the parts of the embedded trainer, in verl's order of initialisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from omegaconf import OmegaConf

from lineage import hooks
from lineage.hooks import Topology, UserError, Weights
from lineage.trainer.actor import ActorRolloutRefWorker
from lineage.trainer.agent_loop import (
    AgentLoopManager,
    AgentLoopWorker,
    LoopContext,
    MultiTurn,
    agent_loop,
    agent_loop_manager_class,
    register_agent_loops,
)
from lineage.trainer.config import need_reference_policy
from lineage.trainer.dataset import DatasetError, RLHFDataset, make_dataloader
from lineage.trainer.engine.topology import topology_of
from lineage.trainer.models import ModelFacts, ModelSource, eos_token_ids, find_model, load_model, load_tokenizer
from lineage.trainer.parts import Parts, Prompts, make_parts, prompt_length, response_length
from lineage.trainer.prompts import PromptStream, ValidationPrompts
from lineage.trainer.queue import LocalTransferQueue
from lineage.trainer.replay_buffer import RefillPolicy, ReplayBuffer
from lineage.trainer.reward import RewardLoopManager, reward_manager
from lineage.trainer.rng import seed_all
from lineage.trainer.rollout.base import RolloutEngine
from lineage.trainer.rollout.hf import HFRollout
from lineage.trainer.tools.config import load_interactions, load_tools
from lineage.trainer.weight_sync import CheckpointEngineManager


@dataclass(frozen=True)
class ResourcePool:
    """Devices by node and the roles they are for (verl ``RayResourcePool``).

    In embedded mode nothing is reserved: this process plays every rank in turn, and the pool says which it plays.
    """

    name: str
    process_on_nodes: tuple[int, ...]
    roles: tuple[str, ...]

    @property
    def world_size(self) -> int:
        """Ranks of the pool."""
        return sum(self.process_on_nodes)


def build_parts(config: Any, queue: Any = None) -> Parts:
    """Tokenizer, dataloader, resource pool, workers, actor and reference, reward loop, rollout, weight sync.

    The order is verl's ``PPOTrainer._setup``; each of them is an event of the open ``init`` stage, by verl's name.

    Args:
        config: resolved configuration.
        queue: TransferQueue's interface; None makes the in-process store.
    """
    seed_all(config.trainer.seed)
    traced_queue = trace_queue(queue)
    source, tokenizer = init_tokenizer(config)
    prompts = init_dataloader(config, tokenizer)
    pool = create_resource_pool(config)
    spawn_worker_groups(pool)
    module = load_module(config, source)
    worker = init_model(config, traced_queue, module, tokenizer, prompts.total_training_steps)
    reward = init_reward_loop_manager(config, tokenizer)
    rollout = init_llm_server_manager(config, worker.policy.resident_copy(), tokenizer)
    checkpoint_manager = init_checkpoint_engine_manager(config, worker, rollout)
    return make_parts(
        config,
        tokenizer,
        prompts,
        ModelFacts.of(module, tokenizer),
        queue=traced_queue,
        worker=worker,
        rollout=rollout,
        reward=reward,
        replay_buffer=ReplayBuffer(traced_queue, policy=RefillPolicy.of(config)),
        checkpoint_manager=checkpoint_manager,
    )


def trace_queue(queue: Any = None) -> Any:
    """TransferQueue's interface with a recorder's eyes on it; None makes the in-process store."""
    return hooks.trace_queue(queue if queue is not None else LocalTransferQueue())


def init_tokenizer(config: Any) -> tuple[ModelSource, Any]:
    """Where the model comes from, and its tokenizer."""
    source, tokenizer = source_and_tokenizer(config)
    made("_init_tokenizer", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    return source, tokenizer


def source_and_tokenizer(config: Any) -> tuple[ModelSource, Any]:
    """The model's files and its tokenizer, as any process of a run loads them."""
    model = config.actor_rollout_ref.model
    source = find_model(model.path, model.tokenizer_path)
    return source, load_tokenizer(source, trust_remote_code=model.trust_remote_code)


def init_dataloader(config: Any, tokenizer: Any) -> Prompts:
    """The streams of prompts, and the steps of the run.

    A made task makes other rows for the validation than for the training: its seed is the next one.
    """
    data, trainer = config.data, config.trainer
    seed = trainer.seed if data.seed is None else data.seed
    rollout = config.actor_rollout_ref.rollout
    prompts: dict[str, Any] = {  # what else the lengths of prompts depend on
        "tool_schemas": {
            name: tool.tool_schema for name, tool in load_tools(rollout.multi_turn.tool_config_path).items()
        },
        "default_agent_loop": rollout.agent.default_agent_loop,
    }
    train = RLHFDataset(data.train_files, tokenizer, data, seed=seed, max_samples=data.train_max_samples, **prompts)
    # groups are replaced one by one, so their prompts are fetched so
    fetched = 1 if RefillPolicy.of(config).evicts else data.gen_batch_size or data.train_batch_size
    if len(train) < data.train_batch_size:
        raise DatasetError(f"{len(train)} rows are fewer than data.train_batch_size={data.train_batch_size}")
    dataloader = make_dataloader(train, batch_size=fetched, shuffle=data.shuffle, seed=seed)
    validation = None
    if data.val_files is not None:
        rows = RLHFDataset(data.val_files, tokenizer, data, seed=seed + 1, max_samples=data.val_max_samples, **prompts)
        validation = ValidationPrompts(
            rows, batch_size=data.val_batch_size, shuffle=data.validation_shuffle, seed=trainer.seed
        )
    steps = trainer.total_training_steps or trainer.total_epochs * (len(train) // data.train_batch_size)
    made(
        "_init_dataloader",
        train_rows=len(train),
        train_rows_dropped=train.dropped,
        gen_batch_size=fetched,
        val_rows=0 if validation is None else len(validation),
        total_training_steps=steps,
    )
    return Prompts(PromptStream(dataloader, trainer.seed), validation, steps)


def create_resource_pool(config: Any) -> ResourcePool:
    """The pool of all ranks; actor, rollout and, if one is needed, reference share it (verl ``global_pool``)."""
    nodes = (config.trainer.n_gpus_per_node,) * config.trainer.nnodes
    role = "actor_rollout_ref" if need_reference_policy(config) else "actor_rollout"
    pool = ResourcePool("global_pool", nodes, (role,))
    made("create_resource_pool", name=pool.name, process_on_nodes=list(nodes), world_size=pool.world_size)
    return pool


def spawn_worker_groups(pool: ResourcePool) -> None:
    """One worker group for the roles of the pool: in embedded mode it is this process, and nothing is started."""
    made("spawn", roles=",".join(pool.roles), world_size=pool.world_size, processes=1)


def load_module(config: Any, source: ModelSource) -> torch.nn.Module:
    """The model to train, on its device."""
    model = config.actor_rollout_ref.model
    module: torch.nn.Module = load_model(
        source,
        dtype=config.actor_rollout_ref.actor.fsdp_config.model_dtype,
        device=device_of(config.trainer.device),
        trust_remote_code=model.trust_remote_code,
        override_config=OmegaConf.to_container(model.override_config),
    )
    use_few_threads(module)
    return module


def init_model(
    config: Any, queue: Any, module: torch.nn.Module, tokenizer: Any, total_training_steps: int
) -> ActorRolloutRefWorker:
    """The engine of the actor and, if one is needed, the reference; records their first weights and the topology."""
    worker = make_worker(config, queue, module, tokenizer, total_training_steps, topology_of(config))
    parameters = sum(parameter.numel() for parameter in module.parameters())
    made("init_model", parameters=parameters, with_reference=worker.reference is not None)
    record_init(worker)
    return worker


def make_worker(
    config: Any,
    queue: Any,
    module: torch.nn.Module,
    tokenizer: Any,
    total_training_steps: int,
    topology: Topology,
    **distributed: Any,
) -> ActorRolloutRefWorker:
    """Actor and, if one is needed, reference, by the configuration.

    Args:
        distributed: ``ranks`` and ``mesh`` of a rank's process.
    """
    return ActorRolloutRefWorker(
        queue,
        module,
        config.actor_rollout_ref,
        topology,
        correction=config.algorithm.rollout_correction,
        total_training_steps=total_training_steps,
        pad_token_id=tokenizer.pad_token_id,
        with_reference=need_reference_policy(config),
        batches_per_step=config.trainer.v1.sync.parameter_sync_step,
        record_weights=config.trace.weights,
        probe=config.trace.probe,
        **distributed,
    )


def init_reward_loop_manager(config: Any, tokenizer: Any) -> RewardLoopManager:
    """Who scores the trajectories, in the agent loop or after it."""
    colocated = config.reward.reward_model.enable
    reward = RewardLoopManager(reward_manager(config.reward, tokenizer), colocated=colocated)
    made("RewardLoopManager", reward_manager=config.reward.reward_manager, colocated=colocated)
    return reward


def init_llm_server_manager(config: Any, module: torch.nn.Module, tokenizer: Any) -> RolloutEngine:
    """The rollout engine, with a copy of the model of its own; it has no weights to serve by before the first sync.

    Args:
        module: that copy.
    """
    rollout = make_rollout(config, module, tokenizer)
    made("LLMServerManager", name=config.actor_rollout_ref.rollout.name, replicas=1)
    return rollout


def make_rollout(config: Any, module: torch.nn.Module, tokenizer: Any) -> RolloutEngine:
    """The engine ``rollout.name`` asks for, over a model of its own."""
    return HFRollout(
        module,
        eos_token_ids=eos_token_ids(module, tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        max_num_seqs=config.actor_rollout_ref.rollout.max_num_seqs,
    )


def init_checkpoint_engine_manager(
    config: Any, worker: ActorRolloutRefWorker, rollout: RolloutEngine
) -> CheckpointEngineManager:
    """What carries the weights from the actor to the rollout."""
    made("CheckpointEngineManager", backend="naive", replicas=1)
    return CheckpointEngineManager(worker, [rollout], record_weights=config.trace.weights)


def made(what: str, producer: str = "PPOTrainer._setup", **attrs: Any) -> None:
    """One step of the initialisation, as an event of the ``init`` stage."""
    text = {name: str(value) for name, value in attrs.items()}
    hooks.current().event("produce", what, producer=producer, attrs=text)


def record_init(worker: ActorRolloutRefWorker) -> None:
    """Rows of the ``init`` stage: the first weights of actor and reference, and the topology.

    The tensors are whole on every rank, so all of them gather; the first rank records.
    """
    stage = hooks.current()
    if not hooks.recorder().enabled:
        return
    first = worker.ranks.first
    actor = dict(worker.state_dict())
    if first:
        stage.params("produce", actor, weights=worker.weights, columns={"status": worker.status()})
    del actor  # one whole model at a time
    reference = dict(worker.reference_state_dict())
    if first and worker.reference is not None:
        stage.params("produce", reference, weights=Weights(0, "ref", training=worker.reference.training))
    if first:
        stage.event("produce", "topology", topology=worker.topology)


def _prompt_length_key(config: Any) -> str:
    """The setting that limits a prompt in the rollout (``Parts.prompt_length``)."""
    own = config.actor_rollout_ref.rollout.prompt_length
    return "actor_rollout_ref.rollout.prompt_length" if own else "data.max_prompt_length"


def build_agent_loop_manager(config: Any, parts: Parts) -> AgentLoopManager:
    """Agent-loop workers over the built parts (verl ``init_agent_loop_manager``)."""
    agent = config.actor_rollout_ref.rollout.agent
    register_loops(config)
    context = loop_context(config, parts.rollout, parts.tokenizer, parts.vocab_size)
    workers = [
        AgentLoopWorker(
            parts.queue,
            context,
            parts.reward.session_scorer,
            default_agent_loop=agent.default_agent_loop,
            seed=config.trainer.seed,
        )
        for _ in range(agent.num_workers)
    ]
    return make_agent_loop_manager(config, workers)


def make_agent_loop_manager(config: Any, workers: Sequence[Any]) -> AgentLoopManager:
    """The manager the configuration names, over workers that are there."""
    agent = config.actor_rollout_ref.rollout.agent
    manager: AgentLoopManager = agent_loop_manager_class(agent.agent_loop_manager_class)(list(workers))
    made(
        "init_agent_loop_manager",
        producer="TaskRunner.init_agent_loop_manager",
        num_workers=agent.num_workers,
        default_agent_loop=agent.default_agent_loop,
        manager=type(manager).__name__,
    )
    return manager


def register_loops(config: Any) -> None:
    """Make the agent loops of the configuration known; an unknown name is a mistake to report now, not in a session."""
    agent = config.actor_rollout_ref.rollout.agent
    if agent.agent_loop_config_path is not None:
        register_agent_loops(agent.agent_loop_config_path)
    agent_loop(agent.default_agent_loop)


def loop_context(config: Any, rollout: Any, tokenizer: Any, vocab_size: int) -> LoopContext:
    """What a worker gives each loop, by the configuration."""
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    return LoopContext(
        rollout=rollout,
        tokenizer=tokenizer,
        prompt_length=prompt_length(config),
        response_length=response_length(config),
        vocab_size=vocab_size,
        prompt_length_key=_prompt_length_key(config),
        truncation=config.data.truncation,
        template_kwargs=OmegaConf.to_container(config.data.apply_chat_template_kwargs),
        calculate_log_probs=config.actor_rollout_ref.rollout.calculate_log_probs,
        multi_turn=MultiTurn(**{item.name: multi_turn[item.name] for item in fields(MultiTurn)}),
        tools=load_tools(multi_turn.tool_config_path),
        interactions=load_interactions(multi_turn.interaction_config_path),
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
