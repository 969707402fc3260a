"""Real process groups of megatron-core, for many parallel sizes: runs in an environment that has it, without ours.

``python megatron_ranks.py POINTS ANSWERS``: both JSON. A point is ``{"world", "tp", "pp", "cp", "ep", "etp",
"dynamic_cp"}``; its answer is what each of its ranks says of the groups it is in, or ``{"refused": why}`` where
Megatron builds none. As many processes as the largest world are started once, and build and
destroy the groups of each point.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")  # of Transformer Engine and Apex, which have no part in this

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402

TIMEOUT = timedelta(seconds=60)  # a rank that fails leaves the others waiting


def members(group: Any) -> list[int]:
    """Ranks of a group in its order, each by a message of its own: the group exists and works."""
    ranks = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(ranks, torch.tensor([dist.get_rank()]), group=group)
    return [int(rank) for rank in ranks]


def build(point: dict[str, Any]) -> dict[str, Any]:
    """What this rank is told of the groups Megatron builds."""
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=point["tp"],
            pipeline_model_parallel_size=point["pp"],
            context_parallel_size=point["cp"],
            expert_model_parallel_size=point["ep"],
            expert_tensor_parallel_size=point["etp"],
            hybrid_context_parallel=point["dynamic_cp"],
            create_gloo_process_groups=False,  # second ones beside NCCL's; here the first are gloo's
        )
    except RuntimeError as error:
        if "is not divisible" not in str(error):
            raise
        return {"refused": str(error)}
    try:
        return {
            "dp": parallel_state.get_data_parallel_world_size(),
            "dp_group": members(parallel_state.get_data_parallel_group()),
            "expert_dp": parallel_state.get_expert_data_parallel_world_size(),
            "expert_dp_group": members(parallel_state.get_expert_data_parallel_group()),
            "coord": {
                "tp": parallel_state.get_tensor_model_parallel_rank(),
                "cp": parallel_state.get_context_parallel_rank(),
                "dp": parallel_state.get_data_parallel_rank(),
                "pp": parallel_state.get_pipeline_model_parallel_rank(),
                "ep": parallel_state.get_expert_model_parallel_rank(),
            },
        }
    finally:
        parallel_state.destroy_model_parallel()


def leave(world: int) -> None:
    """Destroy every group, once each rank is done: another may still be meeting in one that this rank is not in."""
    if world:
        dist.barrier()
        dist.destroy_process_group()


def work(rank: int, points: list[dict[str, Any]], folder: Path) -> None:
    """All points this rank is in; worlds of fewer ranks are those of the first processes."""
    torch.set_num_threads(1)
    answers, world = {}, 0
    for number, point in enumerate(points):
        if rank >= point["world"]:
            continue
        if world != point["world"]:
            leave(world)
            world = point["world"]
            meet = f"file://{folder}/meet{number}"
            dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world, timeout=TIMEOUT)
        answers[number] = build(point)
        if "refused" not in answers[number]:  # its groups go with the world's
            leave(world)
            world = 0
    leave(world)
    (folder / f"rank{rank}.json").write_text(json.dumps(answers))


def main(asked: Path, answered: Path) -> None:
    """Start the ranks, and join what they say: for each point a list by rank."""
    points = json.loads(asked.read_text())
    processes = multiprocessing.get_context("fork")  # Megatron takes seconds to import
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = range(max(point["world"] for point in points))
        started = [processes.Process(target=work, args=(rank, points, folder)) for rank in ranks]
        for process in started:
            process.start()
        for process in started:
            process.join()
        if any(process.exitcode for process in started):
            raise SystemExit(f"exit codes of the ranks: {[process.exitcode for process in started]}")
        said = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in ranks]
    together = [[said[rank][str(i)] for rank in range(point["world"])] for i, point in enumerate(points)]
    answered.write_text(json.dumps(together))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
