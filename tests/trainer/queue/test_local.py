"""What only the store in this process offers."""

from __future__ import annotations

import pytest
import torch
from columns_of import batch
from tensordict import NonTensorStack

from lineage.trainer.queue import LocalTransferQueue


@pytest.fixture
def local() -> LocalTransferQueue:
    """An empty in-process store."""
    return LocalTransferQueue()


def test_slots_are_given_out_in_order(local):
    """The next new key gets the slot that was cleared first."""
    local.kv_batch_put(["a", "b"], "train", tags=[{}, {}])
    assert local.global_indexes(["a", "b"], "train") == [0, 1]
    local.kv_clear("a", "train")
    local.kv_put("c", "val", tag={})
    assert local.global_indexes(["c"], "val") == [0]


def test_resident_counts_bytes(local):
    """Bytes of tensors and strings."""
    local.kv_batch_put(["a", "b"], "train", batch(x=torch.zeros(2, 3), o=NonTensorStack("ab", {"k": 1})))
    assert local.resident() == (0, 2, 2 * 3 * 4 + 2)
    local.kv_clear(["a", "b"], "train")
    assert local.resident() == (0, 0, 0)


def test_init_and_close_start_empty(local):
    """Nothing survives init or close."""
    local.kv_put("a", "train", tag={})
    assert local.init({"controller": 1}) == {"controller": 1}
    assert local.kv_list() == {}
    local.kv_put("a", "train", tag={})
    local.close()
    assert local.kv_list() == {}
