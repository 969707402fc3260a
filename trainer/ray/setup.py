"""Building the processes of a run, in verl's order of initialisation (``PPOTrainer._setup``)."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import ray
from omegaconf import OmegaConf
from ray.exceptions import RayError

from lineage import hooks
from lineage.trainer.agent_loop import AgentLoopManager
from lineage.trainer.config import need_reference_policy
from lineage.trainer.models import ModelFacts
from lineage.trainer.parts import Parts, make_parts
from lineage.trainer.queue.transfer_queue import TransferQueue
from lineage.trainer.ray.agent_loop import AgentLoopProcess, RemoteAgentLoopWorker
from lineage.trainer.ray.cluster import RANK_SHARE, ROLLOUT_SHARE, with_gpu
from lineage.trainer.ray.errors import answers
from lineage.trainer.ray.rank import RankProcess
from lineage.trainer.ray.recording import Line, RunTrace
from lineage.trainer.ray.reward import RewardProcess
from lineage.trainer.ray.rollout import RemoteRollout, RolloutReplica
from lineage.trainer.ray.weight_sync import RayCheckpointEngineManager
from lineage.trainer.ray.worker_group import WorkerGroup
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

_CLOSE_SECONDS = 60.0
_POLL_SECONDS = 0.02  # each look asks a process that serves the agent loops as well


class Cluster:
    """The processes of a run beside the one that drives it, by their names in the trace.

    Args:
        config: the configuration.
        trace: how each process records.
    """

    def __init__(self, config: Any, trace: RunTrace) -> None:
        self.config = config
        self.trace = trace
        self.queue = TransferQueue()
        self.processes: dict[str, Any] = {}

    # ------------------------------------------------------------------------------------------------------ build

    def build_parts(self) -> Parts:
        """Queue, tokenizer, dataloader, resource pool, ranks, reward loop, rollout, weight sync."""
        config = self.config
        seed_all(config.trainer.seed)
        self.queue.init(OmegaConf.to_container(config.transfer_queue, resolve=True))
        _, tokenizer = init_tokenizer(config)
        prompts = init_dataloader(config, tokenizer)
        group = self._spawn_worker_groups(create_resource_pool(config))
        facts = self._init_model(group, prompts.total_training_steps)
        reward = init_reward_loop_manager(config, tokenizer)
        if not reward.colocated:
            self._start_rewards()
        replica = self._init_llm_server_manager()
        made("CheckpointEngineManager", backend="naive", replicas=1)
        self.facts = facts
        return make_parts(
            config,
            tokenizer,
            prompts,
            facts,
            queue=hooks.trace_queue(self.queue),
            worker=group,
            rollout=RemoteRollout(replica),
            reward=reward,
            checkpoint_manager=RayCheckpointEngineManager(group, replica),
            poll_interval=_POLL_SECONDS,
        )

    def build_agent_loop_manager(self, parts: Parts) -> AgentLoopManager:
        """Agent-loop workers, a process each, and the manager the configuration names over them."""
        actor, workers = ray.remote(AgentLoopProcess).options(num_cpus=1), []
        scorers = [process for name, process in self.processes.items() if name.startswith("reward:")]
        replica = self.processes["rollout:0"]
        for number in range(self.config.actor_rollout_ref.rollout.agent.num_workers):
            process = actor.remote(self.trace, number, self.config, self.facts, replica, scorers)
            self.processes[f"agent_loop:{number}"] = process
            workers.append(RemoteAgentLoopWorker(number, process, parts.queue))
        self._ready("agent_loop")
        return make_agent_loop_manager(self.config, workers)

    def _spawn_worker_groups(self, pool: ResourcePool) -> WorkerGroup:
        actor = ray.remote(RankProcess).options(**with_gpu(self.config, RANK_SHARE))
        ranks = [actor.remote(self.trace, rank, pool.world_size, self.config) for rank in range(pool.world_size)]
        self.processes.update({f"actor:{rank}": process for rank, process in enumerate(ranks)})
        self._ready("actor")
        made("spawn", roles=",".join(pool.roles), world_size=pool.world_size, processes=len(ranks))
        return WorkerGroup(ranks)

    def _init_model(self, group: WorkerGroup, total_training_steps: int) -> ModelFacts:
        facts: ModelFacts = group.init_model(total_training_steps)
        made("init_model", parameters=facts.parameters, with_reference=need_reference_policy(self.config))
        return facts

    def _start_rewards(self) -> None:
        actor = ray.remote(RewardProcess).options(num_cpus=1)
        for number in range(self.config.reward.num_workers):
            self.processes[f"reward:{number}"] = actor.remote(self.trace, number, self.config)
        self._ready("reward")

    def _init_llm_server_manager(self) -> Any:
        actor = ray.remote(RolloutReplica).options(**with_gpu(self.config, ROLLOUT_SHARE))
        self.processes["rollout:0"] = actor.remote(self.trace, self.config)
        self._ready("rollout")
        made("LLMServerManager", name=self.config.actor_rollout_ref.rollout.name, replicas=1)
        return self.processes["rollout:0"]

    def _ready(self, kind: str) -> None:
        """Wait until the processes of a kind are there: what is wrong with one is said before the next kind starts."""
        calls = {name: process.pid.remote() for name, process in self.processes.items() if name.startswith(f"{kind}:")}
        answers(calls, "init")

    # -------------------------------------------------------------------------------------------------------- run

    def begin(self, global_steps: int) -> None:
        """Tell every process that a step begins."""
        self._ask("step", global_steps)

    def seal(self) -> None:
        """Have every process seal the step, and say here what they had to say there."""
        for process, lines in zip(self.processes, self._ask("seal"), strict=True):
            _repeat(process, lines)

    def close_recorders(self, why: BaseException | None) -> None:
        """End what every process records; one that is dead has left what it had."""
        processes, self.processes = self.processes, {}
        calls = {process.close.remote(hooks.reason_of(why)): name for name, process in processes.items()}
        ended, _ = ray.wait(list(calls), num_returns=len(calls), timeout=_CLOSE_SECONDS)
        for call in ended:
            with contextlib.suppress(RayError):
                _repeat(calls[call], ray.get(call))

    def _ask(self, what: str, *arguments: Any) -> list[Any]:
        return answers(
            {name: getattr(process, what).remote(*arguments) for name, process in self.processes.items()}, what
        )

    def close_queue(self) -> None:
        """End TransferQueue; a cluster that is already going down has ended it."""
        with contextlib.suppress(Exception):
            self.queue.close()


def _repeat(process: str, lines: list[Line]) -> None:
    for line in lines:
        logging.getLogger(line.name).log(line.level, "%s (%s)", line.message, process)
