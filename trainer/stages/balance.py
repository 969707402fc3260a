"""The balance stage: padding rows until the batch divides, then like work for every data-parallel rank."""

from __future__ import annotations

from lineage import hooks
from lineage.hooks import traced
from lineage.trainer.batching.balance import balance_rows
from lineage.trainer.batching.batch_sizes import BatchSizes
from lineage.trainer.batching.padding import padding_fields, padding_rows
from lineage.trainer.metrics import balance_metrics
from lineage.trainer.parts import Parts
from lineage.trainer.protocol import KVBatchMeta
from lineage.trainer.stages.fields import Metrics


@traced("balance", component="PPOTrainer._balance_batch", consumer="ActorRolloutRefWorker")
def balance_batch(parts: Parts, batch: KVBatchMeta, global_steps: int) -> tuple[KVBatchMeta, Metrics]:
    """Pad the batch so that it divides, then deal rows of like work to the data-parallel ranks."""
    ranks = parts.worker.get_data_parallel_size()
    sizes = BatchSizes.of(parts.config, ranks)
    missing = sizes.missing(len(batch))
    if missing:
        batch = _add_padding(parts, batch, missing, global_steps)
    seq_lens = [tag["seq_len"] for tag in batch.tags]
    balance = balance_rows(seq_lens, ranks if parts.config.trainer.balance_batch else 1)
    batch.reorder(balance.order)
    attrs = {"sub_step": str(batch.extra_info.get("sub_step", 0)), "required_multiple": str(sizes.required_multiple)}
    hooks.current().reorder(batch.keys, source_index=balance.order, tags=batch.tags, attrs=attrs)
    real = [tag["seq_len"] for tag in batch.tags if not tag["is_padding"]]
    return batch, balance_metrics(balance.loads_before, balance.loads_after, real)


def _add_padding(parts: Parts, batch: KVBatchMeta, count: int, global_steps: int) -> KVBatchMeta:
    like = parts.queue.kv_batch_get(keys=batch.keys[:1], partition_id=batch.partition_id)
    rows = padding_rows(
        count,
        batch.tags[0],
        seed=parts.config.trainer.seed,
        global_steps=global_steps,
        sub_step=batch.extra_info.get("sub_step", 0),
    )
    fields = padding_fields(like, rows, parts.eos_token_ids[0])
    parts.queue.kv_batch_put(keys=rows.keys, partition_id=batch.partition_id, fields=fields, tags=rows.tags)
    hooks.current().keys("pad", rows.keys, columns={"is_padding": [True] * count})
    return KVBatchMeta(batch.keys + rows.keys, batch.tags + rows.tags, batch.partition_id, extra_info=batch.extra_info)
