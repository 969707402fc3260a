"""What the trainer's tests share: the tiny model's folder and tokenizer, and composed configurations."""

from __future__ import annotations

import pytest
import torch

from lineage.trainer.models import ModelSource, find_model, load_tokenizer

# The models are tiny: more threads cost more than they bring, and xdist runs several processes.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny() -> ModelSource:
    """The built-in tiny model."""
    return find_model("tiny")


@pytest.fixture(scope="session")
def tokenizer(tiny: ModelSource):
    """Its tokenizer: one token a printable character."""
    return load_tokenizer(tiny)
