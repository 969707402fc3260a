"""What several faults share: the names of seams used more than once, and the tiny model's tokenizer."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from lineage.trainer.models import find_model, load_tokenizer

TRAJECTORY_FIELDS = "lineage.trainer.agent_loop.worker.trajectory_fields"
TRAINER = "lineage.trainer.grpo.PPOTrainerSync"
ESTIMATOR = "lineage.trainer.stages.advantage.compute_advantage"
GENERATE = "lineage.trainer.agent_loop.base.AgentLoopBase.generate"
#: a run in which sessions have several turns
TOOLS = ("+experiment=tools", "data.max_response_length=128")


@functools.cache
def tiny_tokenizer() -> Any:
    """The tokenizer of the built-in tiny model."""
    return load_tokenizer(find_model("tiny"))


def not_eos(ids: Tensor) -> Tensor:
    """What many trainers take for a mask: 1 wherever the token is not the padding token, which is the eos token."""
    return (ids != tiny_tokenizer().eos_token_id).to(torch.int64)
