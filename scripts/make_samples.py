"""Make ``traces/samples``: one good trace, and one bad trace for each code of the catalogue.

``python scripts/make_samples.py [CODE ...]`` records each from a real run of the reference trainer: the built-in tiny
model, two steps of three prompts and two sessions, mini-batches that make every step pad two rows. A bad one has one
fault of ``sample_faults`` in it. No network. Clock, run id and revision are fixed, so that on one machine a second run
writes the same bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from sample_faults import FAULTS, Fault
from transformers.utils.logging import disable_progress_bar

from lineage import hooks
from lineage.checks import check
from lineage.run import TRACE_FILE
from lineage.trainer.config import adapt_to_embedded, compose, resolved, validate_config
from lineage.trainer.grpo import PPOTrainerSync
from lineage.trainer.models import find_model

SAMPLES = Path(__file__).resolve().parents[1] / "traces" / "samples"
OVERRIDES = (
    "data.train_batch_size=3",
    "data.max_response_length=8",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "trainer.n_gpus_per_node=2",
    "trainer.total_training_steps=2",
    "trainer.device=cpu",
    "trainer.logger=[]",
    "trace.weights=false",
)
EPOCH_NS, TICK_NS = 1_767_225_600_000_000_000, 1_000_000  # 2026-01-01, a millisecond


def make(target: Path, fault: Fault | None = None) -> Path:
    """Record one sample.

    Args:
        target: the Parquet file to write; its stem is the run id.
        fault: what goes wrong; None records a good run.

    Returns:
        ``target``.
    """
    config = compose([*OVERRIDES, *(fault.overrides if fault else ())])
    adapt_to_embedded(config)
    validate_config(config)
    model = find_model(config.actor_rollout_ref.model.path)
    facts = {
        "framework": "lineage.trainer",
        "mode": config.mode,
        "seed": config.trainer.seed,
        "model": model.name,
        "model_hash": model.model_hash(),
        "tokenizer_hash": model.tokenizer_hash(),
        "fault": fault and {"code": fault.code, "name": fault.name, "stage": fault.stage, "says": fault.says},
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recording = hooks.recording(folder, run_id=target.stem, config=resolved(config), run=facts)
        with fixed_clock(), fault.inject() if fault else nullcontext(), recording:
            asyncio.run(_train(PPOTrainerSync(config, folder=folder)))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / TRACE_FILE, target)
    return target


async def _train(trainer: PPOTrainerSync) -> None:
    await trainer.init()
    await trainer.fit()


@contextmanager
def fixed_clock() -> Iterator[None]:
    """A clock that moves a millisecond a look, and no revision: a sample is made before the commit that holds it.

    The replay buffer looks at the queue at every turn of the event loop: with a timer, which of two tasks writes its
    row first would depend on the machine's load.
    """
    nanoseconds, seconds = itertools.count(EPOCH_NS, TICK_NS), itertools.count()
    event_clock = SimpleNamespace(time_ns=lambda: next(nanoseconds))
    with ExitStack() as stack:
        stack.enter_context(patch("lineage.recorder.time", event_clock))
        step_clock = SimpleNamespace(perf_counter=lambda: next(seconds) / 1000)
        stack.enter_context(patch("lineage.trainer.metrics.time", step_clock))
        every_turn = SimpleNamespace(sleep=lambda _seconds: asyncio.sleep(0))
        stack.enter_context(patch("lineage.trainer.replay_buffer.asyncio", every_turn))
        stack.enter_context(patch("lineage.run.git_revision", lambda: None))
        yield


def path_of(code: str | None) -> Path:
    """The sample of a code, or the good one."""
    return SAMPLES / "good.parquet" if code is None else SAMPLES / "bad" / f"{code}.parquet"


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the samples that are named, all of them by default."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("codes", nargs="*", metavar="CODE", help="good, or a code of the catalogue; all by default")
    named = parser.parse_args(arguments).codes or ["good", *FAULTS]
    if unknown := [code for code in named if code != "good" and code not in FAULTS]:
        parser.error(f"no fault for {', '.join(unknown)}; known: good, {', '.join(FAULTS)}")
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    disable_progress_bar()
    for code in named:
        made = make(path_of(None if code == "good" else code), FAULTS.get(code))
        head = check(made).headline
        says = f"{head.invariant.code} in {head.violation.stage}" if head else "clean"
        print(f"{made.relative_to(SAMPLES)}  {made.stat().st_size / 1000:.0f} kB  {says}")


if __name__ == "__main__":
    main()
