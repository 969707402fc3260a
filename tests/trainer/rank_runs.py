"""Starting the processes of ``rank_process``, and reading what they left."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq

SCRIPT = Path(__file__).with_name("rank_process.py")


def start(folder: Path, world: int, *words: str) -> None:
    """Run the processes of a world to their end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder), str(rank), str(world), str(port), *words],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(max(world, 1))
    ]
    try:
        ended = [rank.wait(timeout=900) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    said = "\n".join(path.read_text() for path in folder.glob(f"failed{world}_*.txt"))
    assert not any(ended), said or f"processes ended with {ended}"


def merged(ranks, job: str, name: str):
    """Values by key, of every rank; no two have the same key."""
    parts = [rank[job][name] for rank in ranks]
    assert sum(map(len, parts)) == len({key for part in parts for key in part})
    return {key: value for part in parts for key, value in part.items()}


def rows_of(folder: Path, world: int, ranks: int):
    """Rows of the trace of a run."""
    return pq.read_table(folder / f"trace{world}_{ranks}" / "trace.parquet").to_pylist()


def facts(rows, *names: str) -> Counter:
    """What rows say by key, however they are cut: each field of each key of each event, with its contents."""
    made: Counter = Counter()
    for row in rows:
        lists = [row[name] or [None] * row["n"] for name in ("fingerprint", "length", "mask_sum")]
        named = row["key"] or [None] * row["n"]
        for key, *content in zip(named, *lists, strict=True):
            made[
                (row["global_steps"], row["stage"], row["op"], row["field"], *(row[n] for n in names), key, *content)
            ] += 1
    return made
