"""The training of ``lineage run``: in this process, or in a Ray cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lineage import hooks
from lineage.errors import UserError, ViolationError
from lineage.run import point_latest

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from rich.console import Console

    from lineage.checks.gate import Gate
    from lineage.checks.online import StepChecker
    from lineage.hooks import AnyRecorder
    from lineage.trainer.tracking.loggers import Tracking

# for a process that Ray is still ending to let go of its parts
_PATIENCE_SECONDS = 5.0


@dataclass(frozen=True)
class Training:
    """What is trained, and where what comes of it goes.

    Attributes:
        config: validated.
        folder: run folder.
        facts: what the trace says of the run.
        traced: whether there is a trace.
        tracking: takes the metrics.
        console: for what is said of the run as a whole.
        gate: judges the steps, where they are judged as they end.
    """

    config: DictConfig
    folder: Path
    facts: Mapping[str, Any]
    traced: bool
    tracking: Tracking
    console: Console
    gate: Gate

    def begun(self, total: int, done: int) -> None:
        """Everything is built: from now on this run is the latest."""
        point_latest(self.folder)
        for line in _where_it_begins(self.config, done, total):
            self.console.print(line, markup=False)
        self.tracking.begin(total, done)


@dataclass(frozen=True)
class Ended:
    """How a training ended that did not fail.

    Attributes:
        interrupted: by Ctrl-C.
        stopped: what broke in the last step, where ``trainer.lineage.on_violation=raise`` ended the run there.
    """

    interrupted: bool = False
    stopped: str | None = None


def train_here(run: Training) -> Ended:
    """Train in this process (``mode=embedded``).

    Raises:
        UserError: a mistake of the user's that ended the run.
    """
    from lineage.trainer.config import resolved

    config = run.config
    recorder = hooks.open_recorder(
        run.folder,
        enabled=run.traced,
        config=resolved(config),
        run=run.facts,
        every=config.trace.every,
        keep_steps=config.trace.keep_steps,
        sidecar=config.trace.sidecar,
        reuse=config.trace.reuse,
        on_step_sealed=_step_checker(run),
    )
    try:
        asyncio.run(_train(run))
        recorder.close()
    except KeyboardInterrupt as error:
        _close(recorder, error)
        return Ended(interrupted=True)
    except ViolationError as error:
        _close(recorder, error)
        return Ended(stopped=error.headline)
    except BaseException as error:
        _close(recorder, error)
        raise
    finally:
        hooks.install(hooks.NullRecorder())
    return Ended()


def train_on_ray(run: Training) -> Ended:
    """Train in a Ray cluster (``mode=ray``): follow the process that does, and seal what all of them recorded.

    Raises:
        UserError: a mistake of the user's, or the death of a process, that ended the run.
    """
    from lineage.trainer.config import resolved
    from lineage.trainer.ray.recording import RunTrace
    from lineage.trainer.ray.task_runner import Begun, Logged, Shown, Warned, train

    trace = RunTrace(run.folder.resolve(), run.traced, resolved(run.config), run.facts)
    try:
        with contextlib.closing(train(run.config, trace)) as events:
            for event in events:
                match event:
                    case Begun(total, done):
                        run.begun(total, done)
                    case Logged(metrics, step):
                        run.tracking.log(metrics, step)
                    case Shown(samples, step):
                        run.tracking.log_generations(samples, step)
                    case Warned(line):
                        logging.getLogger(line.name).log(line.level, line.message)
    except KeyboardInterrupt:
        return Ended(interrupted=True)
    finally:
        _seal(run.folder)
    return Ended()


async def _train(run: Training) -> None:
    from lineage.trainer.grpo import PPOTrainerSync

    trainer = PPOTrainerSync(run.config, folder=run.folder, tracking=run.tracking)
    await trainer.init()
    manager = trainer.init_agent_loop_manager()  # the last thing a configuration can be wrong about
    run.begun(trainer.total_training_steps, trainer.global_steps)
    await trainer.fit(manager)


def _step_checker(run: Training) -> StepChecker | None:
    """What judges each step as it is sealed, or None: by the gate the check at the end uses."""
    wanted = run.config.trainer.lineage.on_violation
    if wanted == "off":
        return None
    from lineage.checks.online import StepChecker
    from lineage.trainer.config import resolved

    return StepChecker(
        wanted,
        run.gate.invariants,
        baseline=run.gate.baseline,
        run={"run_id": run.folder.name, "profile": "lineage"},
        config=resolved(run.config),
    )


def _close(recorder: AnyRecorder, error: BaseException) -> None:
    """Seal what a run that did not end in order has recorded; with nothing recorded there is nothing to say."""
    with contextlib.suppress(UserError):
        recorder.close(error)


def _seal(folder: Path) -> None:
    """Compact what processes left that died before they could close."""
    import pyarrow as pa

    from lineage.compact import compact
    from lineage.parts import PARTS, parts_folder

    if parts_folder(folder / PARTS) is None:
        return
    patience = time.monotonic() + _PATIENCE_SECONDS
    try:
        while True:
            try:
                compact(folder)
                return
            except UserError:  # one of them still writes: the folder can be read as it is
                if time.monotonic() > patience:
                    return
                time.sleep(0.2)
    except (OSError, pa.ArrowException) as error:
        logging.getLogger("lineage").error("the trace stays in parts under %s: %s", folder / PARTS, error)


def _where_it_begins(config: DictConfig, done: int, total: int) -> list[str]:
    """What a run that was told to go on found."""
    if config.trainer.resume_mode == "disable":
        return []
    if not done:
        return ["no checkpoint to go on from: starts at step 1"]
    left = f"goes on after step {done}"
    return [left] if done < total else [f"{left}: nothing left to train (trainer.total_training_steps={total})"]
