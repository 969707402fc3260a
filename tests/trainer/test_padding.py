"""Padding rows: they make the batch divide and are nothing else."""

from __future__ import annotations

import torch
from tensordict import NonTensorStack, TensorDict

from lineage.hooks import parse_key
from lineage.trainer.batching.padding import padding_fields, padding_rows
from lineage.trainer.protocol import lengths_of, nested_from_list
from lineage.trainer.queue import LocalTransferQueue

TAG = {
    "status": "success",
    "is_padding": False,
    "prompt_len": 9,
    "response_len": 4,
    "seq_len": 13,
    "min_global_steps": 2,
    "max_global_steps": 2,
}


def test_padding_rows_are_a_group_of_their_own():
    """One uid that begins with pad, sessions 0..k-1, tags of lengths and padding, versions as a real row's."""
    rows = padding_rows(3, TAG, seed=1, global_steps=5)
    parsed = [parse_key(key) for key in rows.keys]
    assert {key.uid for key in parsed} == {rows.uid}
    assert rows.uid.startswith("pad")
    assert [key.session_id for key in parsed] == [0, 1, 2]
    for tag in rows.tags:
        assert tag["is_padding"] is True
        assert tag["seq_len"] == tag["prompt_len"] + tag["response_len"]
        assert tag["min_global_steps"] == 2


def test_padding_uid_follows_from_seed_and_step():
    """Two runs of one seed make the same padding keys; another step, or batch of a step, makes others."""
    again = padding_rows(2, TAG, seed=1, global_steps=5)
    assert padding_rows(2, TAG, seed=1, global_steps=5).keys == again.keys
    assert padding_rows(2, TAG, seed=1, global_steps=6).uid != again.uid
    assert padding_rows(2, TAG, seed=1, global_steps=5, sub_step=1).uid != again.uid


def test_padding_fields_have_every_field_and_no_weight():
    """Each field of a real row is there, masks and rewards are zero, and lengths agree with the tags."""
    like = TensorDict(
        {
            "prompts": nested_from_list([torch.arange(9)]),
            "responses": nested_from_list([torch.arange(4)]),
            "input_ids": nested_from_list([torch.arange(13)]),
            "response_mask": nested_from_list([torch.ones(4, dtype=torch.long)]),
            "loss_mask": nested_from_list([torch.ones(4, dtype=torch.long)]),
            "rm_scores": nested_from_list([torch.ones(4)]),
            "num_turns": torch.tensor([2]),
            "uid": NonTensorStack("a"),
            "custom": nested_from_list([torch.ones(4)]),
            "reward_model": NonTensorStack({"ground_truth": "7"}),
            "acc": NonTensorStack(1.0),
            "verdict": NonTensorStack("right"),
        },
        batch_size=[1],
    )
    rows = padding_rows(2, TAG, seed=0, global_steps=1)
    fields = padding_fields(like, rows, eos_token_id=7)
    assert set(fields.keys()) == set(like.keys())
    assert lengths_of(fields["input_ids"]).tolist() == [tag["seq_len"] for tag in rows.tags]
    assert set(fields["input_ids"].values().tolist()) == {7}
    for name in ("response_mask", "loss_mask", "rm_scores", "custom"):
        assert not fields[name].values().any()
    assert fields["uid"].tolist() == [rows.uid] * 2
    assert fields["reward_model"].tolist() == [{}, {}]
    assert fields["acc"].tolist() == [0.0, 0.0]
    assert fields["verdict"].tolist() == ["", ""]
    assert fields["response_mask"].values().dtype == torch.int64


def test_padding_does_not_hide_a_field_of_the_batch():
    """The queue drops a field that one row lacks; after padding every field of the real row is still served."""
    queue = LocalTransferQueue()
    real = TensorDict({"responses": nested_from_list([torch.arange(4)]), "extra": torch.ones(1)}, batch_size=[1])
    queue.kv_batch_put(["u_0_0"], "train", real, [TAG])
    rows = padding_rows(1, TAG, seed=0, global_steps=1)
    queue.kv_batch_put(rows.keys, "train", padding_fields(real, rows, 7), rows.tags)
    assert set(queue.kv_batch_get(["u_0_0", *rows.keys], "train").keys()) == {"responses", "extra"}
