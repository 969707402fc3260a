"""The stores that the shared laws are held against: the one in this process, and the real package in a Ray cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))

from lineage.trainer.queue import LocalTransferQueue

REAL = pytest.param(
    "transfer_queue", marks=[pytest.mark.slow, pytest.mark.xdist_group("ray")]
)  # one cluster, of one worker of pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A Ray cluster of this process; logical CPUs, for the queue's three actors and those of the tests."""
    os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")  # of every process of the cluster, read when it is imported
    import ray

    options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init("local", num_cpus=8, object_store_memory=2**27, **options)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="session")
def started(cluster: Any) -> Iterator[Any]:
    """The real TransferQueue, started by this process."""
    from lineage.trainer.queue.transfer_queue import TransferQueue

    store = TransferQueue()
    store.init({"backend": {"SimpleStorage": {"num_data_storage_units": 2}}})
    yield store
    store.close()


@pytest.fixture
def real(started: Any) -> Any:
    """The real TransferQueue, empty."""
    _empty(started)
    return started


@pytest.fixture(params=["local", REAL])
def queue(request: pytest.FixtureRequest) -> Any:
    """An empty store of the interface."""
    return LocalTransferQueue() if request.param == "local" else request.getfixturevalue("real")


def _empty(store: Any) -> None:
    """Take every partition away, its name too, which no verb of the trainer's does."""
    for partition in store.kv_list():
        store.get_client().clear_partition(partition)
