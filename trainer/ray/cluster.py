"""Ray itself: started as the configuration says, with logical resources, and ended with the run."""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import Any

import ray
from omegaconf import OmegaConf

from lineage.hooks import first_line
from lineage.trainer.ray import ENVIRONMENT
from lineage.trainer.ray.errors import ClusterError
from lineage.trainer.rollout.vllm import need_vllm

# the task runner, and TransferQueue's controller
_OTHERS = 2


def start(config: Any) -> None:
    """Start or join a Ray cluster (verl ``ray_kwargs.ray_init``).

    CPUs are logical: every process of the run asks for one, and a machine of fewer cores lends them by turns. What is
    typed under ``ray_kwargs.ray_init`` goes to ``ray.init`` as it is.

    Raises:
        UserError: what a process of the run needs is not installed.
        ClusterError: Ray does not start, or the cluster has not the CPUs the run asks for.
    """
    if config.actor_rollout_ref.rollout.name == "vllm":
        need_vllm()
    typed = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
    options: dict[str, Any] = {
        "address": "local",
        "include_dashboard": False,
        "logging_level": logging.ERROR,
        "log_to_driver": False,  # warnings come with the steps; all that is printed is in Ray's session folder
    }
    joined = (typed.get("address") or "local") != "local"
    if joined:
        typed["runtime_env"] = _with_environment(typed.get("runtime_env"))
    else:
        options["num_cpus"] = max(os.cpu_count() or 1, processes(config))
    try:
        ray.init(**{**options, **typed})
    except (ValueError, TypeError, RuntimeError, ConnectionError, OSError) as error:
        asked = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
        raise ClusterError(f"ray_kwargs.ray_init={asked}: Ray does not start: {first_line(error)}") from error
    # of one's own nothing is taken yet, and Ray counts what is free with a delay
    free = (ray.available_resources() if joined else ray.cluster_resources()).get("CPU", 0)
    gpus, ranks = ray.cluster_resources().get("GPU", 0), config.trainer.nnodes * config.trainer.n_gpus_per_node
    if _on_gpu(config) and gpus < ranks:
        stop()
        raise ClusterError(
            f"the Ray cluster has {gpus:g} GPUs, the run asks for {ranks}, one a rank: lower trainer.n_ranks, or set "
            "trainer.device=cpu"
        )
    if free < processes(config):
        stop()
        raise ClusterError(
            f"the Ray cluster has {free:g} free logical CPUs, the run asks for {processes(config)}, one a process: "
            "raise ray_kwargs.ray_init.num_cpus (a CPU may be shared)"
        )


def _with_environment(typed: dict[str, Any] | None) -> dict[str, Any]:
    """The job's environment in a cluster whose processes have not this one's: what was typed comes first."""
    typed = typed or {}
    return {**typed, "env_vars": {**{name: os.environ[name] for name in ENVIRONMENT}, **(typed.get("env_vars") or {})}}


def stop() -> None:
    """End what :func:`start` started, or leave the cluster it joined."""
    held = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if held else None
    try:
        ray.shutdown()  # to cut it in the middle leaves a driver that is half gone to the interpreter's end
    finally:
        if held:
            signal.signal(signal.SIGINT, before)


def processes(config: Any) -> int:
    """Processes of a run, each of which asks for a logical CPU."""
    rewards = 0 if config.reward.reward_model.enable else config.reward.num_workers
    rollout = config.actor_rollout_ref.rollout
    served = rollout.agent.num_workers + rollout.num_replicas
    units = OmegaConf.select(config.transfer_queue, "backend.SimpleStorage.num_data_storage_units", default=1)
    return int(_OTHERS + units + config.trainer.nnodes * config.trainer.n_gpus_per_node + served + rewards)


# Of a rank's GPU what is its own, so that no two ranks share one, and what is left for the rollout beside the first.
RANK_SHARE, ROLLOUT_SHARE = 0.6, 0.4


def with_gpu(config: Any, share: float) -> dict[str, Any]:
    """Ray's options of a process that computes with a model: a CPU, and on GPUs a share of one."""
    return {"num_cpus": 1, **({"num_gpus": share} if _on_gpu(config) else {})}


def _on_gpu(config: Any) -> bool:
    device = config.trainer.device
    return bool(device.startswith("cuda") or (device == "auto" and ray.cluster_resources().get("GPU", 0) > 0))
