"""Checkpoints: everything a run needs to go on as if it had never stopped.

verl's layout: ``global_step_<n>/actor/{model,optim,extra_state}.pt``, ``global_step_<n>/data.pt`` and
``latest_checkpointed_iteration.txt``. A step folder appears whole or not at all.
"""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lineage.hooks import UserError
from lineage.trainer.training import TrainingWorker

LATEST = "latest_checkpointed_iteration.txt"
_STEP = re.compile(r"global_step_(\d+)")


class CheckpointError(UserError):
    """A checkpoint could not be written."""


def save_checkpoint(
    folder: Path, global_steps: int, actor: TrainingWorker, dataloader_state: dict[str, Any], *, keep: int | None = None
) -> Path:
    """Save model, optimiser, schedule, random state and the dataloader's position after step ``global_steps``.

    Args:
        folder: ``trainer.default_local_dir``.
        dataloader_state: ``StatefulDataLoader.state_dict()`` and the epoch.
        keep: newest checkpoints to keep; None keeps all.

    Returns:
        The folder of this step.

    Raises:
        CheckpointError: the folder cannot be written; nothing half-written is left behind.
    """
    target = folder / f"global_step_{global_steps}"
    draft = folder / f".global_step_{global_steps}.tmp"
    try:
        shutil.rmtree(draft, ignore_errors=True)
        (draft / "actor").mkdir(parents=True)
        torch.save(actor.module.state_dict(), draft / "actor" / "model.pt")
        torch.save(actor.optimizer.state_dict(), draft / "actor" / "optim.pt")
        extra_state = {"lr_scheduler": actor.scheduler.state_dict(), "rng": rng_state()}
        torch.save(extra_state, draft / "actor" / "extra_state.pt")
        torch.save(dataloader_state, draft / "data.pt")
        shutil.rmtree(target, ignore_errors=True)
        draft.rename(target)
        (folder / LATEST).write_text(str(global_steps))
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint of step {global_steps} to {folder}: {error.strerror or error}; set trainer.default_local_dir"
        ) from error
    if keep is not None:
        _forget_old(folder, keep)
    return target


def rng_state() -> dict[str, Any]:
    """State of every process-wide random generator (sessions have their own, made from the seed)."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def saved_steps(folder: Path) -> list[int]:
    """Steps that have a whole checkpoint in ``folder``, rising."""
    matches = (_STEP.fullmatch(path.name) for path in folder.glob("global_step_*"))
    return sorted(int(match.group(1)) for match in matches if match)


def _forget_old(folder: Path, keep: int) -> None:
    steps = saved_steps(folder)
    for step in steps[: max(0, len(steps) - keep)]:
        shutil.rmtree(folder / f"global_step_{step}", ignore_errors=True)
