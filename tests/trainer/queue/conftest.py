"""The stores that the shared laws are held against: the one in this process, and the real package in a Ray cluster."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))

from columns_of import TWO_UNITS

from lineage.trainer.queue import LocalTransferQueue

REAL = pytest.param(
    "transfer_queue", marks=[pytest.mark.slow, pytest.mark.xdist_group("ray")]
)  # one cluster, of one worker of pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A Ray cluster of this process; logical CPUs, for the queue's three actors and those of the tests."""
    import ray

    import lineage.trainer.ray  # noqa: F401 - the environment of the cluster

    ray.init("local", num_cpus=8, object_store_memory=2**27, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="session")
def stopped(cluster: Any) -> Iterator[Any]:
    """The real TransferQueue, to be started by the first test that needs it, and by the first after its end."""
    from lineage.trainer.queue.transfer_queue import TransferQueue

    store = TransferQueue()
    yield store
    store.close()


@pytest.fixture
def real(stopped: Any) -> Any:
    """The real TransferQueue, started by this process and empty."""
    from lineage.trainer.queue.transfer_queue import QueueStartError

    try:
        _empty(stopped)
    except QueueStartError:
        stopped.init(TWO_UNITS)
    return stopped


@pytest.fixture(params=["local", REAL])
def queue(request: pytest.FixtureRequest) -> Any:
    """An empty store of the interface."""
    return LocalTransferQueue() if request.param == "local" else request.getfixturevalue("real")


def _empty(store: Any) -> None:
    """Take every partition away, its name too, which no verb of the trainer's does and which takes a key in it."""
    for partition in store.kv_list():
        store.kv_put("any", partition, tag={})
        store.get_client().clear_partition(partition)
