"""What tracing costs a training step of the reference trainer, and what a trace weighs.

    python benchmarks/overhead.py [--rounds 10] [--skip-size]
    python benchmarks/overhead.py mode=ray [trainer.n_ranks=2] [--rounds 10]

Trainers of one process, one not traced, one traced, and two whose steps are also checked as they are sealed
(``trainer.lineage.on_violation=warn`` and ``raise``), take turns of a few steps, so that the machine's mood falls on
all; a traced turn ends when its last step is on disk and judged. Printed: the median of the rounds' ratios, for the
recorder in a process of its own (``trace.sidecar=true``, the default) and inside the trainer; rows, facts and bytes a
step. The size by column is measured on a real step of 1,024 trajectories.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from lineage import hooks
from lineage.checks.online import StepChecker
from lineage.hooks import AnyRecorder
from lineage.parts import PARTS
from lineage.schema import LISTED
from lineage.state import read_state
from lineage.trainer.config import compose, resolved, validate_config
from lineage.trainer.grpo import PPOTrainerSync

TURN = 5  # steps of one trainer before the other has its turn
WARM_UP = 4  # steps left out: first use of each kernel and cache


class Runner:
    """A trainer whose steps are run a few at a time, with its own recorder.

    Args:
        folder: run folder.
        recorder: traced, or the recorder that does nothing.
        overrides: of the configuration.
    """

    def __init__(self, folder: Path, recorder: AnyRecorder, overrides: list[str]) -> None:
        self.folder = folder
        self.recorder = recorder
        self.trainer = PPOTrainerSync(configuration(overrides), folder=folder)

    async def start(self) -> None:
        """Build the trainer's parts, as ``fit`` does."""
        hooks.install(self.recorder)
        await self.trainer.init()
        self.trainer.agent_loop_manager = self.trainer.init_agent_loop_manager()
        self.trainer.on_init_end()
        self.recorder.seal()
        await self.turn(WARM_UP)

    async def turn(self, steps: int) -> float:
        """Run so many steps; the seconds a step took, the wait for the disk included."""
        hooks.install(self.recorder)
        start = time.perf_counter()
        for _ in range(steps):
            self.trainer.global_steps += 1
            self.recorder.step(self.trainer.global_steps)
            await self.trainer.step()
            self.recorder.seal()
        if self.recorder.enabled:
            self._wait()
        return (time.perf_counter() - start) / steps

    def _wait(self) -> None:
        """Until the recorder, wherever it is, has done all it was told: it then names the next step."""
        following = self.trainer.global_steps + 1
        self.recorder.step(following)
        state = next((self.folder / PARTS).glob("*.state.json"))
        while read_state(state)["open_step"] != following:
            time.sleep(0.001)


def configuration(overrides: list[str]) -> Any:
    """The resolved configuration of a run on the tiny model."""
    config = compose([*overrides, "trainer.total_training_steps=1000000", "trainer.total_epochs=1000000"])
    validate_config(config)
    return config


async def overhead(root: Path, rounds: int, prompts: int, group: int, tokens: int, sidecar: bool) -> None:
    """Print the ratios of traced, and of traced and checked, to untraced steps at one size."""
    overrides = [
        f"data.train_batch_size={prompts}",
        f"actor_rollout_ref.rollout.n={group}",
        f"data.max_response_length={tokens}",
    ]
    config = resolved(configuration(overrides))
    judges = {"traced": None, "warn": StepChecker("warn", config=config), "raise": StepChecker("raise", config=config)}
    runners = {"plain": Runner(root / "plain", hooks.NullRecorder(), overrides)}
    for name, judge in judges.items():
        recorder = hooks.open_recorder(root / name, config=config, sidecar=sidecar, on_step_sealed=judge)
        runners[name] = Runner(root / name, recorder, overrides)
    for runner in runners.values():
        await runner.start()
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for number in range(rounds):
        for name in list(runners)[:: 1 if number % 2 else -1]:
            seconds[name].append(await runners[name].turn(TURN))
    traces = {name: runners[name].recorder.close() for name in judges}
    trace = traces["traced"]
    assert isinstance(trace, Path)
    table = pq.read_table(trace, columns=["global_steps", "n"])
    steps = len(set(table["global_steps"].to_pylist()))
    facts = sum(table["n"].to_pylist())
    place = "beside" if sidecar else "inside"
    traced, plain = (statistics.median(seconds[name]) * 1e3 for name in ("traced", "plain"))
    print(
        f"{prompts * group:>3} trajectories x {tokens} tokens, recorder {place} the trainer: "
        f"ratio {_ratio(seconds, 'traced'):.3f} (medians {traced:.0f} / {plain:.0f} ms a step, {rounds} rounds of "
        f"{TURN}); {table.num_rows / steps:.0f} rows, {facts / steps:.0f} facts, "
        f"{trace.stat().st_size / steps:.0f} bytes a step",
        flush=True,
    )
    for name in ("warn", "raise"):
        more = statistics.median(a - b for a, b in zip(seconds[name], seconds["traced"], strict=True)) * 1e3
        print(f"    on_violation={name}: ratio {_ratio(seconds, name):.3f} ({more:+.0f} ms a step)", flush=True)


def _ratio(seconds: dict[str, list[float]], name: str) -> float:
    """The median over the rounds of one trainer's step to the untraced one's."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds["plain"], strict=True))


async def size(root: Path) -> None:
    """Print the bytes a fact takes, column by column, at 1,024 trajectories."""
    rows = Path(root, "prompts.jsonl")
    row = (
        '{{"data_source": "builtin/digits", "prompt": [{{"role": "user", "content": "{}"}}], '
        '"reward_model": {{"ground_truth": "1"}}, "extra_info": {{"index": {}}}}}\n'
    )
    rows.write_text("".join(row.format(f"say {number}", number) for number in range(256)))
    overrides = [
        f"data.train_files={rows}",
        "data.train_batch_size=256",
        "actor_rollout_ref.rollout.n=4",
        "data.max_response_length=16",
    ]
    runner = Runner(root, hooks.open_recorder(root, config=resolved(configuration(overrides))), overrides)
    hooks.install(runner.recorder)
    await runner.trainer.init()
    runner.trainer.agent_loop_manager = runner.trainer.init_agent_loop_manager()
    runner.trainer.on_init_end()
    await runner.turn(1)
    trace = runner.recorder.close()
    parquet = pq.ParquetFile(trace)
    facts = sum(parquet.read(columns=["n"])["n"].to_pylist())
    columns: dict[str, int] = {}
    for group in range(parquet.metadata.num_row_groups):
        for number in range(parquet.metadata.num_columns):
            chunk = parquet.metadata.row_group(group).column(number)
            name = chunk.path_in_schema.split(".")[0]
            columns[name] = columns.get(name, 0) + chunk.total_compressed_size
    listed = {column.name for column in LISTED}
    print(f"1024 trajectories: {facts} facts, {sum(columns.values()) / facts:.2f} bytes a fact")
    for name, count in sorted(columns.items(), key=lambda item: -item[1])[:16]:
        print(f"  {count / facts:6.3f}  {name}{'' if name in listed else '  (one a row)'}")


def main() -> None:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="turns of each trainer")
    parser.add_argument("--skip-size", action="store_true", help="leave out the size by column")
    parser.add_argument("overrides", nargs="*", help="with mode=ray among them: on processes (see on_ray.py)")
    arguments = parser.parse_args()
    if arguments.overrides:
        if "mode=ray" not in arguments.overrides:
            parser.error("overrides are for mode=ray; without it the sizes are given")
        from on_ray import on_ray

        on_ray(arguments.overrides, arguments.rounds)
        return
    with tempfile.TemporaryDirectory() as folder:
        for number, (prompts, tokens) in enumerate(((8, 32), (16, 64))):
            for sidecar in (True, False):
                root = Path(folder, f"{number}-{sidecar}")
                asyncio.run(overhead(root, arguments.rounds, prompts, 4, tokens, sidecar))
        if not arguments.skip_size:
            root = Path(folder, "size")
            root.mkdir()
            asyncio.run(size(root))


if __name__ == "__main__":
    main()
