"""The process-wide random generators: seeded once, saved with a checkpoint, and kept from what must not draw from them.

Of the trainer, the first factor of a LoRA adapter and a model with dropout draw from them; sessions, the order of the
prompts and of the mini-batches have generators of their own. A scorer or a tool of the user's may draw too.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed torch, numpy and Python, every device."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def derived_seed(*parts: object) -> int:
    """Seed of a generator of its own, in ``[0, 2**63)``, by what names it: the same in every process."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def rng_state() -> dict[str, Any]:
    """State of all of them, of plain values and tensors, so that reading it back runs no code."""
    kind, words, *rest = np.random.get_state()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [str(kind), [int(word) for word in words], *rest],
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put each where :func:`rng_state` found it."""
    torch.set_rng_state(state["torch"])
    kind, words, *rest = state["numpy"]
    np.random.set_state((kind, np.array(words, dtype=np.uint32), *rest))
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


@contextmanager
def kept_rng() -> Iterator[None]:
    """Whatever the block draws, the generators are afterwards where they were."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)
