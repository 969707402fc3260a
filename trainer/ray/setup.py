"""Building the parts of a trainer over processes, in verl's order of initialisation (``PPOTrainer._setup``)."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

from lineage import hooks
from lineage.trainer.agent_loop import AgentLoopManager
from lineage.trainer.config import need_reference_policy, sequence_parallel_size
from lineage.trainer.models import ModelFacts
from lineage.trainer.parts import Parts, make_parts
from lineage.trainer.queue.transfer_queue import TransferQueue
from lineage.trainer.ray.agent_loop import AgentLoopProcess, RemoteAgentLoopWorker
from lineage.trainer.ray.cluster import RANK_SHARE, ROLLOUT_SHARE, with_gpu
from lineage.trainer.ray.rank import RankProcess
from lineage.trainer.ray.replay_buffer import DriverReplayBuffer
from lineage.trainer.ray.reward import RewardProcess
from lineage.trainer.ray.rollout import RemoteRollout, RolloutReplica
from lineage.trainer.ray.run_processes import RunProcesses
from lineage.trainer.ray.weight_sync import RayCheckpointEngineManager
from lineage.trainer.ray.worker_group import WorkerGroup
from lineage.trainer.replay_buffer import RefillPolicy
from lineage.trainer.rng import seed_all
from lineage.trainer.setup import (
    ResourcePool,
    create_resource_pool,
    init_dataloader,
    init_reward_loop_manager,
    init_tokenizer,
    made,
    make_agent_loop_manager,
)

_POLL_SECONDS = 0.02  # each look asks a process that serves the agent loops as well


def build_parts(config: Any, queue: TransferQueue, processes: RunProcesses) -> Parts:
    """Queue, tokenizer, dataloader, resource pool, ranks, reward loop, rollout, weight sync.

    Args:
        config: resolved configuration.
        queue: started here, and this process's to close.
        processes: takes what is started.
    """
    seed_all(config.trainer.seed)
    queue.init(OmegaConf.to_container(config.transfer_queue, resolve=True))
    traced_queue = hooks.trace_queue(queue)
    _, tokenizer = init_tokenizer(config)
    prompts = init_dataloader(config, tokenizer)
    group = spawn_worker_groups(config, create_resource_pool(config), processes)
    facts = init_model(config, group, prompts.total_training_steps)
    reward = init_reward_loop_manager(config, tokenizer)
    if not reward.colocated:
        processes.start("reward", RewardProcess, config.reward.num_workers, config)
    replicas = init_llm_server_manager(config, processes)
    made("CheckpointEngineManager", backend="naive", replicas=len(replicas))
    return make_parts(
        config,
        tokenizer,
        prompts,
        facts,
        queue=traced_queue,
        worker=group,
        rollout=RemoteRollout(replicas),
        reward=reward,
        replay_buffer=DriverReplayBuffer(traced_queue, _POLL_SECONDS, policy=RefillPolicy.of(config)),
        checkpoint_manager=RayCheckpointEngineManager(group, replicas),
    )


def build_agent_loop_manager(config: Any, parts: Parts, processes: RunProcesses) -> AgentLoopManager:
    """Agent-loop workers, a process each, and the manager the configuration names over them."""
    number = config.actor_rollout_ref.rollout.agent.num_workers
    loops = processes.start(
        "agent_loop", AgentLoopProcess, number, config, parts.rollout, parts.vocab_size, processes.of("reward")
    )
    workers = [RemoteAgentLoopWorker(number, loop, parts.queue) for number, loop in enumerate(loops)]
    return make_agent_loop_manager(config, workers)


def spawn_worker_groups(config: Any, pool: ResourcePool, processes: RunProcesses) -> WorkerGroup:
    """A process for every rank of the pool."""
    options = with_gpu(config, RANK_SHARE)
    ranks = processes.start("actor", RankProcess, pool.world_size, pool.world_size, config, options=options)
    made("spawn", roles=",".join(pool.roles), world_size=pool.world_size, processes=len(ranks))
    return WorkerGroup(ranks, sequence_parallel_size(config))


def init_model(config: Any, group: WorkerGroup, total_training_steps: int) -> ModelFacts:
    """The engine of actor and reference, on all ranks together."""
    facts: ModelFacts = group.init_model(total_training_steps)
    made("init_model", parameters=facts.parameters, with_reference=need_reference_policy(config))
    return facts


def init_llm_server_manager(config: Any, processes: RunProcesses) -> list[Any]:
    """Handles of the rollout's replicas, a process each."""
    options, rollout = with_gpu(config, ROLLOUT_SHARE), config.actor_rollout_ref.rollout
    replicas = processes.start("rollout", RolloutReplica, rollout.num_replicas, config, options=options)
    made("LLMServerManager", name=rollout.name, replicas=len(replicas))
    return replicas
