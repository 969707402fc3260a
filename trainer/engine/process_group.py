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


def init_process_group(
    rank: int,
    world_size: int,
    *,
    master_addr: str,
    master_port: int,
    device: str = "cpu",
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Join the default process group; tensors on CUDA go by NCCL, all else by gloo.

    Args:
        rank: of this process, from 0.
        world_size: ranks in all.
        master_addr: host of the first rank.
        master_port: a free port of it; every rank is told the same.
        device: of the model, ``cpu`` or ``cuda[:n]``; the second makes it the current device.
        timeout_s: seconds to wait for the others, now and in every collective.

    Raises:
        ProcessGroupError: the others did not come.
    """
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.set_device(device if ":" in device else rank % torch.cuda.device_count())
    try:
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if cuda else "gloo",
            init_method=f"tcp://{master_addr}:{master_port}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ValueError) as error:  # torch's own errors of the store and the network are RuntimeErrors
        raise ProcessGroupError(
            f"rank {rank} of {world_size} did not join {master_addr}:{master_port}: {first_line(error)}"
        ) from error


def destroy_process_group() -> None:
    """Leave the process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
