"""What a cluster that was joined is told of a run, without Ray's processes."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import ray

from lineage.hooks import UserError
from lineage.trainer.config import compose
from lineage.trainer.ray import ENVIRONMENT, cluster


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What ``ray.init`` is asked for; there is room for everything."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(ray, "init", asked.update)
    for name in ("cluster_resources", "available_resources"):
        monkeypatch.setattr(ray, name, lambda: {"CPU": 100})
    return asked


def test_processes_of_a_joined_cluster_have_the_environment_of_the_run(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is typed, and what the user's own environment says, comes before ours."""
    monkeypatch.setenv("TQ_NUM_THREADS", "3")
    typed = "{address: auto, runtime_env: {working_dir: here, env_vars: {TQ_LOGGING_LEVEL: INFO, MINE: '1'}}}"
    cluster.start(compose(["mode=ray", f"ray_kwargs.ray_init={typed}"]))
    assert asked["runtime_env"]["working_dir"] == "here"
    variables = asked["runtime_env"]["env_vars"]
    assert variables.keys() == ENVIRONMENT.keys() | {"MINE"}
    assert (variables["TQ_LOGGING_LEVEL"], variables["TQ_NUM_THREADS"], variables["MINE"]) == ("INFO", "3", "1")
    assert "num_cpus" not in asked


@pytest.mark.parametrize("typed", ["{}", "{address: local}"])
def test_processes_of_ones_own_cluster_inherit_it(asked: dict[str, Any], typed: str) -> None:
    """A job with an environment of its own would have Ray start each of its processes anew."""
    config = compose(["mode=ray", f"ray_kwargs.ray_init={typed}"])
    cluster.start(config)
    assert "runtime_env" not in asked
    assert asked["num_cpus"] >= cluster.processes(config)


def test_an_engine_that_is_not_installed_is_said_before_anything_starts(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line with the pip lines; Ray is not asked."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"rollout.name=vllm needs vLLM.*pip install"):
        cluster.start(compose(["mode=ray", "rollout.name=vllm"]))
    assert not asked


def test_every_replica_is_a_process() -> None:
    """Of which the cluster needs a logical CPU each."""
    one, three = (
        cluster.processes(compose(["mode=ray", "rollout.name=vllm", f"rollout.num_replicas={count}"]))
        for count in (1, 3)
    )
    assert three - one == 2
