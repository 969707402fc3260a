"""The process group of a distributed run: one process a rank, which find each other by an address."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from lineage.hooks import UserError, first_line

#: seconds a rank waits for the others
TIMEOUT_S = 600.0


class ProcessGroupError(UserError):
    """The ranks did not find each other."""


def host_store(host: str, timeout_s: float = TIMEOUT_S) -> dist.TCPStore:
    """Where the ranks meet, in the first one's process, on a port the system chose: ``store.port``.

    It holds that port from now on. One that is looked up, given back and bound again by ``init_process_group`` may be
    another program's by then.

    Args:
        host: of this process, by the name the other ranks reach it.
        timeout_s: seconds to wait for what another rank is to leave there.
    """
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def init_process_group(
    rank: int,
    world_size: int,
    *,
    master_addr: str,
    master_port: int,
    hosted: dist.TCPStore | None = None,
    device: str = "cpu",
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Join the default process group; tensors on CUDA go by NCCL, all else by gloo.

    Args:
        rank: of this process, from 0.
        world_size: ranks in all.
        master_addr: host of the first rank.
        master_port: port of its store; every rank is told the same.
        hosted: that store, in the process that has made it (:func:`host_store`). Where no rank has one the first makes
            it, and the port must be free.
        device: of the model, ``cpu`` or ``cuda[:n]``; the second makes it the current device.
        timeout_s: seconds to wait for the others, now and in every collective.

    Raises:
        ProcessGroupError: the others did not come.
    """
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.set_device(device if ":" in device else rank % torch.cuda.device_count())
    try:
        timeout = timedelta(seconds=timeout_s)
        store = hosted or dist.TCPStore(
            master_addr, master_port, is_master=rank == 0, wait_for_workers=False, timeout=timeout
        )
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
    except (RuntimeError, ValueError) as error:  # torch's own errors of the store and the network are RuntimeErrors
        raise ProcessGroupError(
            f"rank {rank} of {world_size} did not join {master_addr}:{master_port}: {first_line(error)}"
        ) from error


def destroy_process_group() -> None:
    """Leave the process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
