"""The checkpoint stage: everything a run needs to go on, saved before the weights go to the rollout; and going on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lineage import hooks
from lineage.hooks import traced
from lineage.trainer.checkpoint import find_checkpoint, read_checkpoint, restore, save_checkpoint
from lineage.trainer.parts import Parts

# what decides which prompt comes when, under which uid, in which batch, and what its sessions draw
_SHARED = (
    "trainer.seed",
    "data.seed",
    "data.train_files",
    "data.train_max_samples",
    "data.train_batch_size",
    "data.gen_batch_size",
    "data.shuffle",
    "trainer.v1.sync.parameter_sync_step",
)


def save_is_due(parts: Parts, global_steps: int) -> bool:
    """True every ``trainer.save_freq`` steps, and at the last one."""
    every = parts.config.trainer.save_freq
    return every > 0 and (global_steps % every == 0 or global_steps == parts.total_training_steps)


@traced("checkpoint", component="PPOTrainer._save_checkpoint")
def save(parts: Parts, run_folder: Path, global_steps: int) -> None:
    """Save model, optimiser, schedule, random state and the place in the data, after step ``global_steps``."""
    save_checkpoint(
        checkpoint_folder(parts, run_folder),
        global_steps,
        parts.worker,
        parts.stream,
        stateful=parts.stateful,
        settings=_shared(parts),
        keep=parts.config.trainer.max_actor_ckpt_to_keep,
    )


def load(parts: Parts, run_folder: Path) -> int:
    """Go on from the checkpoint ``trainer.resume_mode`` asks for; an event of the ``init`` stage says from which step.

    Returns:
        The step after which it was saved, 0 for a run that begins.

    Raises:
        CheckpointError: there is none to go on from, or it does not fit this run.
    """
    trainer = parts.config.trainer
    path = find_checkpoint(trainer.resume_mode, checkpoint_folder(parts, run_folder), trainer.resume_from_path)
    step = taken = 0
    if path is not None:
        checkpoint = read_checkpoint(path)
        taken = restore(checkpoint, parts.worker, parts.stream, stateful=parts.stateful, settings=_shared(parts))
        step = checkpoint.global_steps
    attrs = {"resume_mode": str(trainer.resume_mode), "global_steps": str(step)}
    attrs |= {"epoch": str(parts.stream.epoch), "drawn": str(parts.stream.drawn), "optimizer_steps": str(taken)}
    hooks.current().event("produce", "_load_checkpoint", producer="PPOTrainer._setup", attrs=attrs)
    return step


def checkpoint_folder(parts: Parts, run_folder: Path) -> Path:
    """``trainer.default_local_dir``, or ``checkpoints`` in the run folder."""
    return Path(parts.config.trainer.default_local_dir or run_folder / "checkpoints").expanduser()


def _shared(parts: Parts) -> dict[str, Any]:
    values = {name: OmegaConf.select(parts.config, name) for name in _SHARED}
    plain = {
        name: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value for name, value in values.items()
    }
    return {**plain, "rows of data.train_files": len(parts.stream.dataloader.dataset)}
