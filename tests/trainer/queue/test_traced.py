"""The recorder over the real TransferQueue: the rows that it writes over the store in this process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from columns_of import batch, nested
from tensordict import NonTensorStack

import lineage
from lineage.attach.transfer_queue import TracedQueue
from lineage.hooks import traced
from lineage.trainer.protocol import KVBatchMeta, nested_tokens_last
from lineage.trainer.queue import LocalTransferQueue

KEYS = [f"u_{row}_0" for row in range(4)]
OTHERS = [f"other_{row}_0" for row in range(256)]  # take the slots that tests before this one left to be given out


async def step(queue: Any) -> None:
    """A step by both kinds of functions: every verb, keys and fields that are not there, a ghost."""
    with traced("prompt", component="driver"):
        queue.kv_batch_put(["u"], "train", tags=[{"is_prompt": True, "status": "pending", "global_steps": 1}])
    with traced("rollout", component="loop", consumer="buffer"):
        for row, key in enumerate(KEYS):
            fields = batch(
                responses=nested([*range(row + 1)]),
                position_ids=nested_tokens_last([torch.arange(2 * row + 4).reshape(2, row + 2)]),
                rm_scores=torch.tensor([float(row)]),
                extra_fields=NonTensorStack({"turns": [row]}),
            )
            tag = {"prompt_len": 1, "response_len": row + 1, "seq_len": row + 2, "global_steps": 1, "status": None}
            await queue.async_kv_batch_put([key], "train", fields, [tag])
        queue.kv_put(KEYS[0], "train", fields={"num_turns": torch.tensor(2)}, tag={"status": "success"})
        await queue.async_kv_put("u", "train", tag={"status": "finished"})
    with traced("sample", component="buffer"):
        await queue.async_kv_clear(["u"], "train")
    with traced("old_log_prob", component="worker"):
        queue.kv_batch_get([*KEYS, "gone_0_0"], "train", ["responses", "rm_scores", "num_turns"])
        await queue.async_kv_batch_get(KEYS[::-1], "train", ["rm_scores", "position_ids", "extra_fields", "responses"])
        queue.kv_batch_get(KEYS[:1], "train", "nothing")
        meta = queue.kv_batch_put(KEYS, "train", batch(old_log_probs=nested(*([-0.5] * (row + 1) for row in range(4)))))
        await queue.async_kv_batch_get_by_meta(meta, ["old_log_probs"])
        queue.kv_batch_get_by_meta(KVBatchMeta(KEYS[1:2], [{}], "train", ["position_ids", "extra_fields"]))
    with traced("clear", component="driver"):
        queue.kv_clear(KEYS, "train")
    with traced("rollout", component="loop"):
        await queue.async_kv_batch_put(KEYS[:1], "train", batch(rm_scores=torch.tensor([1.0])))


def recorded(folder: Path, store: Any) -> list[dict[str, Any]]:
    """Rows of two steps over a store."""
    store.kv_batch_put(OTHERS, "other", tags=[{}] * len(OTHERS))
    with lineage.record(folder, run_id="r", sidecar=False) as recorder:
        for number in (1, 2):
            recorder.step(number)
            asyncio.run(step(TracedQueue(store)))
            recorder.seal()
    return pq.read_table(folder / "trace.parquet").drop_columns(["time_ns"]).to_pylist()


def by_first_sight(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with slots counted in the order they are met: which number a store begins with is its own affair."""
    seen: dict[int, int] = {}
    for row in rows:
        if row["slot"] is not None:
            row["slot"] = [slot if slot is None else seen.setdefault(slot, len(seen)) for slot in row["slot"]]
    return rows


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_the_rows_are_those_of_the_store_in_this_process(tmp_path: Path, real: Any) -> None:
    """Row for row and value for value, what is missing and the slots included; only bytes left are not known."""
    here = by_first_sight(recorded(tmp_path / "local", LocalTransferQueue()))
    there = by_first_sight(recorded(tmp_path / "real", real))
    left = [row["resident"] for row in here if row["resident"] is not None]
    assert [one["bytes"] for one in left if one["trajectories"]]  # there is something to compare
    assert {row["resident"]["bytes"] for row in there if row["resident"] is not None} == {None}
    for row in (*here, *there):
        row["resident"] = row["resident"] and {**row["resident"], "bytes": None}
    assert any(row["missing"] for row in here)
    assert any(row["slot"] for row in here)
    assert {row["op"] for row in here} == {"tag", "produce", "consume", "clear"}
    assert there == here
