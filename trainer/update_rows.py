"""What the trace says of one micro-batch of the update: the policy's log-probs, and each term of the loss by token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lineage import hooks
from lineage.trainer.correction.rollout_correction import rejected_rows
from lineage.trainer.ppo_loss import MicroLoss, PolicyRows
from lineage.trainer.protocol import padded_to_nested

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
    stage, lengths = hooks.current(), torch.tensor(rows.lengths("loss_mask"), device=inputs.mask.device)
    rejected, context = loss.policy_mask is not inputs.mask, {**context, "span": "response"}
    mask = padded_to_nested(inputs.mask, lengths)
    seen = padded_to_nested(inputs.log_prob.detach(), lengths)
    made = {name: padded_to_nested(matrix, lengths) for name, matrix in loss.per_token.items()}
    own = {name: made.pop(name) for name in ("pg_loss",) if rejected}
    stage.forward({"log_probs": seen, **made}, keys=rows.keys, mask=mask, **context)
    old = padded_to_nested(inputs.old_log_prob, lengths)
    stage.compare("log_probs", seen, "old_log_probs", old, mask=mask, keys=rows.keys, **context)
    if rejected:
        kept = padded_to_nested(loss.policy_mask, lengths)
        reasons = rejected_rows(inputs.mask, loss.policy_mask)
        stage.forward({"response_mask": kept, **own}, keys=rows.keys, mask=kept, columns={"reason": reasons}, **context)
