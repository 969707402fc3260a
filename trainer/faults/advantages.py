"""Faults of advantages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lineage.trainer.faults.registry import Seams, fault


@fault("ADV001", "advantage")
def advantages_not_masked() -> Seams:
    """The score of a session is broadcast over the whole padded response, without the mask."""

    def estimate(original: Any, scores: Tensor, mask: Tensor, *rest: Any, **options: Any) -> Any:
        return original(scores, torch.ones_like(mask), *rest, **options)

    return {"lineage.trainer.stages.advantage.compute_advantage": estimate}
