"""What tracing costs a step of ``mode=ray``: one run, of which every other step is traced.

The same processes run both kinds of step by turns, so that the machine's mood falls on both. A step is timed from the
metrics of the one before it to its own, the sealing of every process included.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq

from lineage.run import TRACE_FILE
from lineage.trainer.config import compose, resolved, validate_config
from lineage.trainer.ray.recording import RunTrace
from lineage.trainer.ray.task_runner import Logged, train

WARM_UP = 4  # steps left out: first use of each kernel and cache


def on_ray(overrides: Sequence[str], pairs: int) -> None:
    """Print the ratio of traced to untraced steps, each next to each other.

    Args:
        overrides: of the configuration, ``mode=ray`` among them.
        pairs: pairs of steps.
    """
    steps = WARM_UP + 2 * pairs
    config = compose([*overrides, f"trainer.total_training_steps={steps}", "trace.every=2", "trainer.logger=[]"])
    validate_config(config)
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "run")
        folder.mkdir()
        last = None
        for event in train(config, RunTrace(folder, True, resolved(config), {})):
            if isinstance(event, Logged):
                now = time.perf_counter()
                seconds += [] if last is None else [now - last]
                last = now
        table = pq.read_table(folder / TRACE_FILE, columns=["global_steps", "n"])
    timed = seconds[WARM_UP - 1 :]  # of the steps after the warm-up: odd ones are traced
    traced, plain = timed[0::2], timed[1::2]
    ratio = statistics.median(a / b for a, b in zip(traced, plain, strict=True))
    own = table.filter(table["global_steps"].to_numpy() > 0)
    traced_steps = len(set(own["global_steps"].to_pylist()))
    trajectories = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    print(
        f"{trajectories:>3} trajectories x {config.data.max_response_length} tokens on {ranks} ranks, "
        f"a recorder in each process: ratio {ratio:.3f} (medians {statistics.median(traced) * 1e3:.0f} / "
        f"{statistics.median(plain) * 1e3:.0f} ms a step, {len(plain)} pairs); {own.num_rows / traced_steps:.0f} rows, "
        f"{sum(own['n'].to_pylist()) / traced_steps:.0f} facts a step",
        flush=True,
    )
