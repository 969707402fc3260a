"""Context structs: which weights, how tokens were drawn, one loss term, one optimiser step, the parallel layout.

Each class mirrors a struct column of the schema, field for field.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Weights:
    """Weights that were used, sent or received.

    Attributes:
        version: optimiser-step version; 0 before the first update.
        phase: whose copy: ``actor``, ``engine`` or ``ref``.
        cache_epoch: how often the engine's prefix cache was reset.
        adapter: name of the active adapter, if any.
        training: the module was in training mode.
    """

    version: int
    phase: str = "actor"
    cache_epoch: int | None = None
    adapter: str | None = None
    training: bool | None = None


@dataclass(frozen=True)
class Sampling:
    """How the engine drew tokens, as it was effective (not as it was asked)."""

    temperature: float
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    do_sample: bool = True
    seed: int | None = None
    logprobs_mode: str | None = None


@dataclass(frozen=True)
class LossTerm:
    """One term of the loss on one micro-batch: ``scale * numerator / denominator`` was added to the loss."""

    term: str
    mode: str
    numerator: float
    denominator: float
    scale: float
    rows: int
    tokens: int


@dataclass(frozen=True)
class Optim:
    """One optimiser step."""

    lr: float
    grad_norm: float
    clip: float | None = None
    skipped: bool = False


@dataclass(frozen=True)
class Topology:
    """Parallel layout: the sizes it was built from and the data-parallel size the backend reports."""

    backend: str
    world_size: int
    reported_dp: int
    fsdp_size: int | None = None
    sp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dynamic_cp: bool = False
    rollout_tp: int = 1
    rollout_dp: int = 1


@dataclass(frozen=True)
class Resident:
    """What a queue still holds."""

    prompts: int
    trajectories: int
    bytes: int | None  # None where a queue cannot say
