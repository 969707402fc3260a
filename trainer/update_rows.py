"""What the trace says of one micro-batch of the update: the policy's log-probs, and each term of the loss by token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lineage import hooks
from lineage.trainer.correction.rollout_correction import rejected_rows
from lineage.trainer.engine.ulysses import SequenceParallel
from lineage.trainer.ppo_loss import MicroLoss, PolicyRows
from lineage.trainer.protocol import nested_from_values, nested_tokens_last

if TYPE_CHECKING:
    from lineage.trainer.training import SequenceRows

#: attributes of a row of the ledger: the loss of its micro-batch as the backward pass began with it, and the watched
#: number of the gradient before that pass and after it
BACKWARD, BEFORE, AFTER = "backward", "gradient_before", "gradient_after"


@dataclass(frozen=True)
class PassedBack:
    """The backward pass of one micro-batch.

    Attributes:
        value: the loss it began with.
        before, after: the watched number of the gradient (``step_watch``), on the host or on the device; None where
            there is none, or no trace.
    """

    value: Tensor
    before: float | Tensor | None
    after: float | Tensor | None

    def scalars(self) -> list[Tensor]:
        """Everything :meth:`read` needs of the device."""
        return [self.value, *(number for number in (self.before, self.after) if isinstance(number, Tensor))]

    def read(self, values: Iterator[float]) -> dict[str, str]:
        """As attributes, from the values of :meth:`scalars` on the host; without a gradient the number is 0."""
        said = {BACKWARD: repr(next(values))}
        for name, number in ((BEFORE, 0.0 if self.before is None else self.before), (AFTER, self.after)):
            if number is not None and self.after is not None:
                said[name] = repr(next(values) if isinstance(number, Tensor) else number)
        return said


@dataclass(frozen=True)
class MicroRows:
    """A micro-batch as it is kept until the host waits for the device anyway, at the end of its mini-batch.

    Recorded at once it would be copied to the host between its forward and its backward pass, and the device would
    stand still meanwhile.

    Attributes:
        rows: the micro-batch.
        given: what the model was given, padded.
        inputs: what its loss read, without the graph.
        context: place in the update, weights and temperature.
    """

    rows: SequenceRows
    given: Mapping[str, Tensor]
    inputs: PolicyRows
    context: Mapping[str, Any]

    def record(self, loss: MicroLoss) -> None:
        """Record the forward pass, and how far it is from the old log-probs.

        Before the batch's first optimiser step the log-probs are the old ones computed again; afterwards they have
        moved.

        Args:
            loss: its loss, with what each token had.
        """
        # of a mini-batch, not of each micro-batch: a row less for each of them
        place = {name: self.context[name] for name in ("ppo_epoch", "mini_batch", "update_index")}
        record_given(self.rows, self.given, place)
        stage, context = hooks.current(), {**self.context, "span": "response"}
        sizes, mask = self.rows.lengths("loss_mask"), self.inputs.mask
        width = mask.shape[1]
        at = torch.cat([torch.arange(row * width, row * width + size) for row, size in enumerate(sizes)])
        at = at.to(mask.device)

        def jagged(matrix: Tensor) -> Tensor | list[Tensor]:
            values = matrix.detach().reshape(-1)[at].requires_grad_(matrix.requires_grad)
            if values.device.type == "cpu":  # a nested tensor costs ten times as much; elsewhere each row is a copy
                return list(values.split(sizes))
            return nested_from_values(values, torch.tensor(sizes))

        kept, seen, old = jagged(mask), jagged(self.inputs.log_prob), jagged(self.inputs.old_log_prob)
        made = {name: jagged(matrix) for name, matrix in loss.per_token.items()}
        rejected = loss.policy_mask is not mask
        own = {name: made.pop(name) for name in ("pg_loss",) if rejected}
        stage.forward({"log_probs": seen, **made}, keys=self.rows.keys, mask=kept, **context)
        stage.compare("log_probs", seen, "old_log_probs", old, mask=kept, keys=self.rows.keys, **context)
        if rejected:
            left, reasons = jagged(loss.policy_mask), rejected_rows(mask, loss.policy_mask)
            columns = {"reason": reasons}
            stage.forward({"response_mask": left, **own}, keys=self.rows.keys, mask=left, columns=columns, **context)


@dataclass(frozen=True)
class Sliced:
    """The slice of a forward pass that this process's model was given, kept until the host waits for the device.

    Attributes:
        rows: the rows of the pass.
        slices: ``(batch, width)`` by field, padding included; positions of k axes ``(k, batch, width)``.
        place: context of their trace rows.
        sequence: the processes that share the sequences out, and which of them this is.
    """

    rows: SequenceRows
    slices: Mapping[str, Tensor]
    place: Mapping[str, Any]
    sequence: SequenceParallel

    def record(self) -> None:
        """Record of each row the tokens of the slice that are the row's; none where it ends before the slice.

        ``begins`` is the place of the slice in the sequence, so that the slices of a row, put together, can be held
        against the row.
        """
        width = self.slices["input_ids"].shape[-1]
        begins = self.sequence.rank * width
        held = [min(max(length - begins, 0), width) for length in self.rows.lengths("input_ids")]
        fields = {}
        for name, values in self.slices.items():
            by_row = values.transpose(0, 1) if values.dim() == 3 else values
            fields[f"{name}_slice"] = nested_tokens_last(
                [row[..., :own] for row, own in zip(by_row.cpu(), held, strict=True)]
            )
        attrs = {"begins": str(begins), "width": str(width), "slices": str(self.sequence.size)}
        hooks.current().pad(fields, keys=self.rows.keys, span="sequence", attrs=attrs, **self.place)


def record_given(rows: SequenceRows, given: Mapping[str, Tensor], place: Mapping[str, Any] | None = None) -> None:
    """Record what a model was given for these rows: ``given``, padded to one width.

    Args:
        place: of their mini-batch, in an update.
    """
    lengths = {"sequence": rows.lengths("input_ids")}
    hooks.current().pad(given, keys=rows.keys, lengths=lengths, **(place or {}))
