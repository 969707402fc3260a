"""What the stages share: fields out of the queue, back into it, and cut to the response."""

from __future__ import annotations

from tensordict import TensorDict
from torch import Tensor

from lineage.trainer.parts import Parts
from lineage.trainer.protocol import KVBatchMeta, lengths_of, response_window

Metrics = dict[str, float]


def response_part(values: Tensor, response_mask: Tensor) -> Tensor:
    """Full-sequence jagged values cut to the response, whose length is the mask's."""
    seq_lens, response_lens = lengths_of(values), lengths_of(response_mask)
    return response_window(values, seq_lens - response_lens, seq_lens)


def put(parts: Parts, batch: KVBatchMeta, columns: dict[str, Tensor]) -> None:
    """Write fields back under the keys of the batch."""
    fields = TensorDict(columns, batch_size=[len(batch)])
    parts.queue.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
