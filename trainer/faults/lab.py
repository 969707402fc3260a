"""One small real run, clean or with one fault in it, recorded.

The built-in tiny model, two steps of three prompts and two sessions, mini-batches that make every step pad two rows.
Clock, run id and revision are fixed, so that on one machine a second run writes the same bytes. No network.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from omegaconf import OmegaConf

from lineage import hooks
from lineage.run import TRACE_FILE
from lineage.trainer.config import adapt_to_mode, compose, resolved, validate_config
from lineage.trainer.faults.registry import INCOMPLETE, Fault
from lineage.trainer.faults.rows import TraceRows
from lineage.trainer.grpo import PPOTrainerSync
from lineage.trainer.models import find_model
from lineage.trainer.quiet import quiet_libraries

OVERRIDES = (
    "data.train_batch_size=3",
    "data.max_response_length=8",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "trainer.n_gpus_per_node=2",
    "trainer.total_training_steps=2",
    "trainer.device=cpu",
    "trainer.logger=[]",
    "trace.probe=1",
)
#: in an override, the folder of the run, which is gone afterwards: ``trainer.rollout_data_dir={folder}/dump``
FOLDER = "{folder}"
EPOCH_NS, TICK_NS = 1_767_225_600_000_000_000, 1_000_000  # 2026-01-01, a millisecond


def record(target: Path, fault: Fault | None = None, overrides: Sequence[str] = ()) -> Path:
    """Record one run.

    Args:
        target: the Parquet file to write; its stem is the run id.
        fault: what goes wrong; None records a clean run.
        overrides: configuration beyond the lab's and the fault's; :data:`FOLDER` in one is the folder of the run.

    Returns:
        ``target``.

    Raises:
        ConfigError: the configuration cannot run.
    """
    with tempfile.TemporaryDirectory() as name:
        _record(target, Path(name), fault, [*(fault.overrides if fault else ()), *overrides])
    if fault is not None and fault.edit is not None:
        rows = TraceRows(target)
        fault.edit(rows)
        rows.write(target)
    return target


def record_halves(first: Path, second: Path, after: int, overrides: Sequence[str] = ()) -> tuple[Path, Path]:
    """Record a clean run that stops, and the run that goes on from its checkpoint.

    Args:
        first: the Parquet file of the run that stops.
        second: of the one that goes on.
        after: the step after which the first stops.
        overrides: as in :func:`record`.

    Returns:
        ``first, second``.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (before := folder / "before").mkdir()
        (then := folder / "then").mkdir()
        saving = [f"trainer.default_local_dir={folder}/checkpoints", f"trainer.save_freq={after}"]
        _record(first, before, None, [*overrides, *saving, f"trainer.total_training_steps={after}"])
        going_on = f"trainer.resume_from_path={folder}/checkpoints/global_step_{after}"
        _record(second, then, None, [*overrides, *saving, "trainer.resume_mode=resume_path", going_on])
    return first, second


def _record(target: Path, folder: Path, fault: Fault | None, overrides: Sequence[str]) -> None:
    quiet_libraries()
    config = compose([line.replace(FOLDER, str(folder)) for line in (*OVERRIDES, *overrides)])
    adapt_to_mode(config)
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
    said = _anywhere(resolved(config), folder)
    if config.mode == "ray":
        _record_on_ray(config, folder, facts, fault)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / TRACE_FILE, target)
        return
    profile = (fault and fault.profile) or "lineage"
    recording = hooks.recording(folder, run_id=target.stem, profile=profile, config=said, run=facts)
    with fixed_clock(), fault.inject() if fault else nullcontext(), recording:
        asyncio.run(_train(PPOTrainerSync(config, folder=folder)))
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(folder / TRACE_FILE, target)


def _record_on_ray(config: Any, folder: Path, facts: dict[str, Any], fault: Fault | None) -> None:
    """Train on processes, the fault in each of them; one that kills a process ends the run as it would anywhere."""
    from lineage.trainer.faults.remote import runtime_env
    from lineage.trainer.ray.errors import ProcessDiedError
    from lineage.trainer.ray.recording import RunTrace
    from lineage.trainer.ray.task_runner import train

    if fault is not None:
        OmegaConf.update(config, "ray_kwargs.ray_init.runtime_env", runtime_env(fault.name), force_add=True)
    dies = fault is not None and fault.code == INCOMPLETE
    with suppress(ProcessDiedError) if dies else nullcontext():
        for _ in train(config, RunTrace(folder, True, resolved(config), facts)):
            pass


def _anywhere(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The configuration without the name of a folder that is made for one run: two runs say the same."""
    said: dict[str, Any] = json.loads(json.dumps(config).replace(str(folder), "."))
    return said


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
