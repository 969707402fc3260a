"""What tracing costs a training step of the reference trainer, and what a trace weighs.

    python benchmarks/overhead.py [--pairs 20] [--skip-size]

Each measurement is one run in which every other step is traced (``trace.every=2``): a traced step and the untraced one
after it are a pair, so that the machine's mood falls on both. Printed: the median of the pairs' ratios, rows, facts and
bytes a step. The size by column is measured on real steps of 1,024 trajectories.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq

from lineage import hooks
from lineage.schema import LISTED
from lineage.trainer.config import compose, resolved, validate_config
from lineage.trainer.grpo import PPOTrainerSync

WARM_UP = 4  # steps left out: first use of each kernel and cache


@dataclass
class Clock:
    """Takes the time each step ends."""

    ends: list[float] = field(default_factory=list)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Called by the trainer after a step is sealed."""
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        """Seconds of each step but the first."""
        return [after - before for before, after in zip(self.ends, self.ends[1:], strict=False)]


def train(folder: Path, steps: int, every: int, prompts: int, group: int, tokens: int) -> tuple[Clock, Path]:
    """Train the tiny model and return the clock and the trace."""
    config = compose(
        [
            f"data.train_batch_size={prompts}",
            f"actor_rollout_ref.rollout.n={group}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts // 2}",
            f"data.max_response_length={tokens}",
            f"trainer.total_training_steps={steps}",
            "trainer.total_epochs=1000",
        ]
    )
    validate_config(config)
    recorder = hooks.open_recorder(folder, config=resolved(config), every=every)
    clock = Clock()

    async def go() -> None:
        trainer = PPOTrainerSync(config, folder=folder, tracking=clock)
        await trainer.init()
        await trainer.fit()

    asyncio.run(go())
    trace = recorder.close()
    hooks.install(hooks.NullRecorder())
    assert isinstance(trace, Path)
    return clock, trace


def overhead(root: Path, pairs: int, prompts: int, group: int, tokens: int) -> None:
    """Print the ratio of traced to untraced steps at one size."""
    steps = WARM_UP + 2 * pairs
    clock, trace = train(root / f"{prompts * group}x{tokens}", steps, 2, prompts, group, tokens)
    # clock.seconds[i] is step i + 2; odd steps are traced
    timed = {step + 2: seconds for step, seconds in enumerate(clock.seconds) if step + 2 > WARM_UP}
    ratios = [timed[step] / timed[step + 1] for step in sorted(timed) if step % 2 and step + 1 in timed]
    traced = statistics.median(seconds for step, seconds in timed.items() if step % 2)
    plain = statistics.median(seconds for step, seconds in timed.items() if not step % 2)
    table = pq.read_table(trace, columns=["global_steps", "n"])
    seen = len(set(table["global_steps"].to_pylist()))
    facts = sum(table["n"].to_pylist())
    print(
        f"{prompts * group:>4} trajectories x {tokens} tokens: ratio {statistics.median(ratios):.3f} "
        f"(medians {traced * 1e3:.0f} / {plain * 1e3:.0f} ms, {len(ratios)} pairs); "
        f"{table.num_rows / seen:.0f} rows, {facts / seen:.0f} facts, {trace.stat().st_size / seen:.0f} bytes a step"
    )


def size(root: Path) -> None:
    """Print the bytes a fact takes, column by column, at 1,024 trajectories."""
    _, trace = train(root / "size", 2, 1, 256, 4, 16)
    parquet = pq.ParquetFile(trace)
    facts = sum(parquet.read(columns=["n"])["n"].to_pylist())
    columns: dict[str, int] = {}
    for group in range(parquet.metadata.num_row_groups):
        for number in range(parquet.metadata.num_columns):
            chunk = parquet.metadata.row_group(group).column(number)
            name = chunk.path_in_schema.split(".")[0]
            columns[name] = columns.get(name, 0) + chunk.total_compressed_size
    listed = {column.name for column in LISTED}
    total = sum(columns.values())
    print(f"1024 trajectories: {facts} facts, {total / facts:.2f} bytes a fact")
    for name, count in sorted(columns.items(), key=lambda item: -item[1])[:16]:
        print(f"  {count / facts:6.3f}  {name}{'' if name in listed else '  (one a row)'}")


def main() -> None:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="traced and untraced steps compared")
    parser.add_argument("--skip-size", action="store_true", help="leave out the size by column")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        overhead(root, arguments.pairs, prompts=8, group=4, tokens=32)
        overhead(root, arguments.pairs, prompts=16, group=4, tokens=64)
        if not arguments.skip_size:
            size(root)


if __name__ == "__main__":
    main()
