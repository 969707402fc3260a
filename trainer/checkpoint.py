"""Checkpoints: everything a run needs to go on as if it had never stopped.

verl's layout: the folder ``global_step_<n>/actor``, which the worker writes, on every rank (``engine.model_state``);
``extra_state.pt`` and ``data.pt`` beside it, which the driver writes, and ``latest_checkpointed_iteration.txt``.
``run.json`` says what a run that goes on must have in common with the one that saved. A step folder appears whole or
not at all, and is read whole before anything is changed by it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from lineage.hooks import UserError, first_line
from lineage.trainer.rng import rng_state, set_rng_state

LATEST = "latest_checkpointed_iteration.txt"
SETTINGS = "run.json"
_STEP = re.compile(r"global_step_(\d+)")
_ACTOR = "actor"
_FILES = {"extra_state": "extra_state.pt", "data": "data.pt"}


class CheckpointError(UserError):
    """A checkpoint could not be written, found, read or used."""


class Trained(Protocol):
    """Who keeps model, optimiser and schedule: one worker, or a group of them."""

    def save_checkpoint(self, folder: Path) -> None:
        """Write them to a folder that is there."""
        ...

    def load_checkpoint(self, folder: Path, global_steps: int) -> int:
        """Go on from such a folder, saved after that step; the optimiser's steps by what was saved."""
        ...


class Stateful(Protocol):
    """What has a state to keep."""

    def state_dict(self) -> dict[str, Any]:
        """The state, of plain values and tensors."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> object:
        """Go on from a state."""
        ...


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as read.

    Attributes:
        folder: ``global_step_<n>``.
        global_steps: the step after which it was saved.
        settings: what the run that saved it was made of (see ``save_checkpoint``).
        extra_state: the driver's random generators, and the states of other things by name.
        data: place in the stream of prompts.
    """

    folder: Path
    global_steps: int
    settings: dict[str, Any]
    extra_state: dict[str, Any]
    data: dict[str, Any]


# ------------------------------------------------------------------------------------------------------------- save


def save_checkpoint(
    folder: Path,
    global_steps: int,
    worker: Trained,
    stream: Stateful,
    *,
    stateful: Mapping[str, Stateful] | None = None,
    settings: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> Path:
    """Save model, optimiser, schedule, random state and the place in the data after step ``global_steps``.

    Args:
        folder: ``trainer.default_local_dir``.
        stream: the stream of prompts.
        stateful: whatever else has a state, by name.
        settings: plain values that a run which goes on must share.
        keep: newest checkpoints to keep, of those up to this step; None keeps all.

    Returns:
        The folder of this step.

    Raises:
        CheckpointError: the folder cannot be written; nothing half-written is left behind.
    """
    target = folder / f"global_step_{global_steps}"
    draft, latest = folder / f".global_step_{global_steps}.tmp", folder / f".{LATEST}.tmp"
    parts = {
        "extra_state": {
            "rng": rng_state(),
            "stateful": {name: thing.state_dict() for name, thing in (stateful or {}).items()},
        },
        "data": stream.state_dict(),
    }
    try:
        shutil.rmtree(draft, ignore_errors=True)
        (draft / _ACTOR).mkdir(parents=True)
        worker.save_checkpoint(draft / _ACTOR)
        for name, part in parts.items():
            torch.save(part, draft / _FILES[name])
        (draft / SETTINGS).write_text(json.dumps({"global_steps": global_steps, "settings": dict(settings or {})}))
        shutil.rmtree(target, ignore_errors=True)
        draft.rename(target)
        latest.write_text(str(global_steps))
        os.replace(latest, folder / LATEST)
    except (OSError, RuntimeError) as error:  # torch's writer has an error of its own for a disk that takes no more
        shutil.rmtree(draft, ignore_errors=True)
        with contextlib.suppress(OSError):
            latest.unlink(missing_ok=True)
        why = error.strerror if isinstance(error, OSError) else "the disk took only a part of it"
        raise CheckpointError(
            f"checkpoint of step {global_steps} to {folder}: {why or error}; free some space there, or set "
            "trainer.default_local_dir"
        ) from error
    if keep is not None:
        _forget_old(folder, global_steps, keep)
    return target


def saved_steps(folder: Path) -> list[int]:
    """Steps that have a whole checkpoint in ``folder``, rising."""
    matches = (_STEP.fullmatch(path.name) for path in folder.glob("global_step_*"))
    return sorted(int(match.group(1)) for match in matches if match)


def _forget_old(folder: Path, global_steps: int, keep: int) -> None:
    steps = [step for step in saved_steps(folder) if step <= global_steps]
    for step in steps[: max(0, len(steps) - keep)]:
        shutil.rmtree(folder / f"global_step_{step}", ignore_errors=True)


# ------------------------------------------------------------------------------------------------------------- find


def find_checkpoint(mode: str, folder: Path, resume_from_path: str | None) -> Path | None:
    """The step folder to go on from, or None to start anew.

    Args:
        mode: ``trainer.resume_mode``.
        folder: where this run saves; ``auto`` takes its newest checkpoint, if there is one.
        resume_from_path: ``global_step_<n>`` folder of ``resume_path``.

    Raises:
        CheckpointError: the folder asked for is not there or is no step folder, or the newest one is not what
            ``latest_checkpointed_iteration.txt`` says. Starting anew would then overwrite a run.
    """
    if mode == "disable":
        return None
    if mode == "auto":
        return _newest(folder)
    if resume_from_path is None:
        raise CheckpointError("trainer.resume_mode=resume_path needs trainer.resume_from_path=.../global_step_<n>")
    path = Path(resume_from_path).expanduser()
    if not _STEP.fullmatch(path.name):
        raise CheckpointError(f"trainer.resume_from_path={resume_from_path} does not end in global_step_<n>")
    if not path.is_dir():
        raise CheckpointError(f"trainer.resume_from_path={resume_from_path}: no such folder{_others(path.parent)}")
    return path


def _newest(folder: Path) -> Path | None:
    tracker = folder / LATEST
    if not tracker.exists():
        steps = saved_steps(folder)
        if steps:
            raise CheckpointError(
                f"{folder} has checkpoints but no {LATEST}: name one, trainer.resume_mode=resume_path "
                f"trainer.resume_from_path={folder / f'global_step_{steps[-1]}'}"
            )
        return None
    try:
        text = tracker.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{tracker} cannot be read: {first_line(error)}") from error
    if not text.isascii() or not text.isdigit():
        raise CheckpointError(f"{tracker} does not hold the number of a step{_others(folder)}")
    path = folder / f"global_step_{int(text)}"
    if not path.is_dir():
        raise CheckpointError(f"{tracker} says {text}, and there is no {path}{_others(folder)}")
    return path


def _others(folder: Path) -> str:
    steps = saved_steps(folder)
    return f"; there is {', '.join(f'global_step_{step}' for step in steps)}" if steps else ""


# ------------------------------------------------------------------------------------------------------------- load


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read the driver's part of a step folder; nothing it holds is run.

    Raises:
        CheckpointError: a file is missing, damaged, or not one of ours.
    """
    step = int(folder.name.rpartition("_")[2])
    told = _settings(folder)
    if told["global_steps"] != step:
        raise CheckpointError(f"{folder} was saved after step {told['global_steps']}: the folder was renamed")
    parts = {name: _load(folder / file) for name, file in _FILES.items()}
    return Checkpoint(folder, step, told["settings"], **parts)


def _settings(folder: Path) -> dict[str, Any]:
    try:
        told = json.loads((folder / SETTINGS).read_text())
        return {"global_steps": int(told["global_steps"]), "settings": dict(told["settings"])}
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no {SETTINGS}: it is no whole checkpoint of this trainer") from error
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{folder / SETTINGS} is damaged: {first_line(error)}") from error


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint {path.parent} is not whole: {path.name} is missing") from error
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged, or not a checkpoint of this trainer") from error


def restore(
    checkpoint: Checkpoint,
    worker: Trained,
    stream: Stateful,
    *,
    stateful: Mapping[str, Stateful] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> int:
    """Put a run where the one that saved the checkpoint was.

    What is set by the configuration stays as this run sets it: the learning rate is its own schedule's at that step.

    Args:
        stateful, settings: as of :func:`save_checkpoint`.

    Returns:
        Steps the optimiser had taken, by what was saved (``model_state.load_state``).

    Raises:
        CheckpointError: it was saved by a run with other data, seed or model; says which key. Nothing is changed then.
    """
    stateful = stateful or {}
    _check_settings(checkpoint, settings or {})
    states = checkpoint.extra_state.get("stateful", {})
    if set(states) != set(stateful):
        raise CheckpointError(
            f"{checkpoint.folder} keeps the state of {', '.join(sorted(states)) or 'nothing else'}, this run has "
            f"{', '.join(sorted(stateful)) or 'nothing else'}: give both the same algorithm"
        )
    try:
        taken = worker.load_checkpoint(checkpoint.folder / _ACTOR, checkpoint.global_steps)
        for name, thing in stateful.items():
            thing.load_state_dict(states[name])
        stream.load_state_dict(checkpoint.data)
        set_rng_state(checkpoint.extra_state["rng"])
    except (KeyError, ValueError, RuntimeError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{checkpoint.folder} does not fit this run: {first_line(error)}") from error
    return taken


def _check_settings(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        was = checkpoint.settings.get(name)
        if was != value:
            raise CheckpointError(
                f"{checkpoint.folder} was saved with {name}={_text(was)}, this run has {_text(value)}: a run that goes "
                "on has the same prompts in the same order; set it, or trainer.resume_mode=disable"
            )


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
