"""What the trace says of one micro-batch of the update: the policy's log-probs, and each term of the loss by token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lineage import hooks
from lineage.trainer.correction.rollout_correction import rejected_rows
from lineage.trainer.ppo_loss import MicroLoss, PolicyRows
from lineage.trainer.protocol import nested_from_values

if TYPE_CHECKING:
    from lineage.trainer.training import SequenceRows

#: attribute of a row of the ledger: the loss of its micro-batch as the backward pass began with it
BACKWARD = "backward"


def record_micro_batch(rows: SequenceRows, inputs: PolicyRows, loss: MicroLoss, context: dict[str, Any]) -> None:
    """Record the forward pass of a micro-batch, and how far it is from the old log-probs.

    Before the batch's first optimiser step the log-probs are the old ones computed again; afterwards they have moved.

    Args:
        rows: the micro-batch.
        inputs: what its loss read.
        loss: its loss.
        context: place in the update, weights and temperature.
    """
    if not hooks.recorder().enabled:
        return
    stage, context = hooks.current(), {**context, "span": "response"}
    sizes, width = rows.lengths("loss_mask"), inputs.mask.shape[1]
    spans = [torch.arange(row * width, row * width + size) for row, size in enumerate(sizes)]
    at = torch.cat(spans).to(inputs.mask.device)

    def jagged(matrix: Tensor) -> Tensor | list[Tensor]:
        values = matrix.detach().reshape(-1)[at].requires_grad_(matrix.requires_grad)
        if values.device.type == "cpu":  # a nested tensor costs ten times as much; elsewhere each row would be a copy
            return list(values.split(sizes))
        return nested_from_values(values, torch.tensor(sizes))

    mask, seen, old = jagged(inputs.mask), jagged(inputs.log_prob.detach()), jagged(inputs.old_log_prob)
    made = {name: jagged(matrix) for name, matrix in loss.per_token.items()}
    rejected = loss.policy_mask is not inputs.mask
    own = {name: made.pop(name) for name in ("pg_loss",) if rejected}
    stage.forward({"log_probs": seen, **made}, keys=rows.keys, mask=mask, **context)
    stage.compare("log_probs", seen, "old_log_probs", old, mask=mask, keys=rows.keys, **context)
    if rejected:
        kept, reasons = jagged(loss.policy_mask), rejected_rows(inputs.mask, loss.policy_mask)
        stage.forward({"response_mask": kept, **own}, keys=rows.keys, mask=kept, columns={"reason": reasons}, **context)
