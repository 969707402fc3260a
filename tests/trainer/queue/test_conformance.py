"""TransferQueue's interface and its measured semantics, true of the store in this process and of the real one.

Every test takes the ``queue`` fixture: an empty store with TransferQueue's functions (``kv_put`` and the others).
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from columns_of import batch, names, nested, rows_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from lineage.trainer.protocol import KVBatchMeta, nested_from_list

# -------------------------------------------------------------------------------------------------------------- get


def test_get_of_unknown_keys_or_partition_raises(queue):
    """When no key is known the error says so, in TransferQueue's words."""
    queue.kv_put("a", "train", tag={"x": 1})
    with pytest.raises(ValueError, match="keys or partition were not found!"):
        queue.kv_batch_get(["z"], "train", "x")
    with pytest.raises(ValueError, match="keys or partition were not found!"):
        queue.kv_batch_get(["a"], "elsewhere", "x")


def test_get_with_some_unknown_keys_is_silently_shorter(queue):
    """Three keys asked, one unknown: two rows come back without an error."""
    queue.kv_batch_put(["a", "b"], "train", batch(x=torch.tensor([1, 2])))
    data = queue.kv_batch_get(["a", "z", "b"], "train", "x")
    assert data.batch_size == torch.Size([2])
    assert data["x"].tolist() == [1, 2]


def test_a_field_that_one_row_lacks_is_absent_for_all(queue):
    """One row without a field and the field is gone for the whole batch, silently."""
    queue.kv_batch_put(["a", "b"], "train", batch(x=torch.tensor([1, 2])))
    queue.kv_batch_put(["a"], "train", batch(y=torch.tensor([3])))
    assert names(queue.kv_batch_get(["a", "b"], "train")) == {"x"}
    assert names(queue.kv_batch_get(["a", "b"], "train", ["x", "y"])) == {"x"}
    assert names(queue.kv_batch_get(["a"], "train")) == {"x", "y"}


def test_an_unknown_field_beside_a_known_one_is_left_out(queue):
    """Asking for a field nobody wrote returns the others."""
    queue.kv_batch_put(["a"], "train", batch(x=torch.tensor([1])))
    assert names(queue.kv_batch_get(["a"], "train", ["x", "nope"])) == {"x"}


def test_fields_come_in_the_order_asked(queue):
    """Of a get and of a get by meta; where none is named, the order is the store's own."""
    queue.kv_batch_put(["a"], "train", batch(b=torch.tensor([1]), c=torch.tensor([1]), a=torch.tensor([1])))
    asked = ["c", "a", "b"]
    assert list(queue.kv_batch_get(["a"], "train", asked).keys()) == asked
    assert list(queue.kv_batch_get_by_meta(KVBatchMeta(["a"], [{}], "train", asked)).keys()) == asked
    assert names(queue.kv_batch_get(["a"], "train")) == set(asked)


def test_only_unknown_fields_give_an_empty_batch(queue):
    """Asking only for fields nobody wrote returns an empty TensorDict of batch size 0."""
    queue.kv_batch_put(["a"], "train", batch(x=torch.tensor([1])))
    data = queue.kv_batch_get(["a"], "train", ["nope"])
    assert data.batch_size == torch.Size([0])
    assert names(data) == set()


def test_no_common_field_raises_when_none_is_named(queue):
    """Rows whose fields do not intersect cannot be fetched whole."""
    queue.kv_batch_put(["a"], "train", batch(x=torch.tensor([1])))
    queue.kv_batch_put(["b"], "train", batch(y=torch.tensor([1])))
    with pytest.raises(ValueError, match="Some fields are not ready in all the requested keys!"):
        queue.kv_batch_get(["a", "b"], "train")


def test_duplicate_keys_repeat_rows_in_the_order_of_the_keys(queue):
    """A get may name a key twice; rows come in the order asked."""
    queue.kv_batch_put(["a", "b"], "train", batch(x=torch.tensor([1, 2])))
    assert queue.kv_batch_get(["b", "a", "b"], "train")["x"].tolist() == [2, 1, 2]


def test_one_key_and_one_field_may_be_strings(queue):
    """A single key or field needs no list."""
    queue.kv_batch_put(["a"], "train", batch(x=torch.tensor([1])))
    assert queue.kv_batch_get("a", "train", "x")["x"].tolist() == [1]


def test_get_returns_a_copy(queue):
    """Changing what a get returned, or what was put, changes nothing in the store."""
    values, words = torch.tensor([[1, 2]]), {"inner": [1]}
    queue.kv_batch_put(["a"], "train", batch(x=values, o=NonTensorStack(words)))
    values.fill_(9)
    words["inner"].append(9)
    data = queue.kv_batch_get(["a"], "train")
    data["x"].values().fill_(7)
    data.get("o").tolist()[0]["inner"].append(7)
    again = queue.kv_batch_get(["a"], "train")
    assert rows_of(again, "x") == [[1, 2]]
    assert again.get("o").tolist() == [{"inner": [1]}]


# --------------------------------------------------------------------------------------------------------------- put


def test_put_needs_fields_or_tags(queue):
    """Nothing to write is an error."""
    with pytest.raises(ValueError, match="at least one parameter of fields or tag"):
        queue.kv_put("a", "train")
    with pytest.raises(ValueError, match="at least one parameter of `fields` or `tags`"):
        queue.kv_batch_put(["a"], "train")


def test_put_sizes_must_match(queue):
    """As many rows and as many tags as keys."""
    with pytest.raises(ValueError, match="batch_size 2"):
        queue.kv_batch_put(["a"], "train", batch(x=torch.tensor([1, 2])))
    with pytest.raises(ValueError, match="length of tags 2"):
        queue.kv_batch_put(["a"], "train", tags=[{}, {}])


def test_duplicate_keys_raise_after_storing_and_the_last_wins(queue):
    """The error comes too late: the data are in, the last row's."""
    with pytest.raises(ValueError, match=r"Got duplicated keys\."):
        queue.kv_batch_put(["a", "a"], "train", batch(x=torch.tensor([1, 2])))
    assert queue.kv_batch_get(["a"], "train")["x"].tolist() == [2]


def test_tags_are_merged(queue):
    """A put of tags updates the old tag; a put without tags returns the stored one."""
    queue.kv_put("a", "train", tag={"x": 1, "y": 1})
    assert queue.kv_put("a", "train", tag={"y": 2}).tags == [{"x": 1, "y": 2}]
    assert queue.kv_put("a", "train", fields={"v": torch.tensor(1)}).tags == [{"x": 1, "y": 2}]
    assert queue.kv_list("train") == {"train": {"a": {"x": 1, "y": 2}}}


def test_put_returns_what_every_row_has_now(queue):
    """The returned batch lists all common fields, old ones included, and no extra_info."""
    queue.kv_batch_put(["a", "b"], "train", batch(x=torch.tensor([1, 2])))
    meta = queue.kv_batch_put(["a", "b"], "train", batch(y=torch.tensor([1, 2])))
    assert set(meta.fields) == {"x", "y"}
    assert (meta.keys, meta.partition_id, meta.extra_info) == (["a", "b"], "train", {})


def test_nested_in_a_dict_and_plain_non_tensor_data_are_refused(queue):
    """kv_put takes no nested tensor in a dict, and NonTensorData needs a stack."""
    with pytest.raises(ValueError, match="kv_batch_put"):
        queue.kv_put("a", "train", fields={"x": nested([1.0])})
    with pytest.raises(TypeError):
        queue.kv_batch_put(["a"], "train", TensorDict({"o": NonTensorData("s")}, batch_size=[1]))


def test_overwriting_checks_neither_length_nor_dtype(queue):
    """A field is overwritten row by row; mixed rows come back as one tensor of the first row's dtype, cut to it."""
    queue.kv_batch_put(["a", "b"], "train", batch(x=torch.tensor([[1, 2], [3, 4]])))
    queue.kv_batch_put(["b"], "train", batch(x=torch.tensor([[0.5, 0.5, 0.5]])))
    assert rows_of(queue.kv_batch_get(["b", "a"], "train"), "x") == [[0.5, 0.5, 0.5], [1.0, 2.0]]
    assert rows_of(queue.kv_batch_get(["a", "b"], "train"), "x") == [[1, 2], [0, 0, 0]]


def test_mixed_numbers_are_promoted(queue):
    """One number a row, some int and some float: the column is float."""
    queue.kv_batch_put(["a", "b"], "train", batch(n=torch.tensor([1, 2])))
    queue.kv_batch_put(["b"], "train", batch(n=torch.tensor([0.5])))
    assert queue.kv_batch_get(["a", "b"], "train")["n"].tolist() == [1.0, 0.5]


# ------------------------------------------------------------------------------------------------- list, clear, meta


def test_clear_forgets_keys_and_keeps_the_partition(queue):
    """A cleared key is gone from the list, unknown ones are ignored, the emptied partition still shows."""
    queue.kv_batch_put(["a", "b"], "train", batch(x=torch.tensor([1, 2])))
    queue.kv_clear(["a", "nope"], "train")
    assert list(queue.kv_list("train")["train"]) == ["b"]
    queue.kv_clear("b", "train")
    queue.kv_clear(["b"], "nowhere")
    assert queue.kv_list() == {"train": {}}


def test_list_of_an_empty_store_and_of_one_partition(queue):
    """No partitions, no entries; one partition alone when it is named."""
    assert queue.kv_list() == {}
    queue.kv_put("a", "train", tag={})
    queue.kv_put("b", "val", tag={})
    assert set(queue.kv_list()) == {"train", "val"}
    assert set(queue.kv_list("val")) == {"val"}


def test_a_write_to_a_cleared_key_creates_it_again(queue):
    """A late writer brings the key back with its own fields and an empty tag."""
    queue.kv_put("a", "train", fields={"x": torch.tensor(1), "y": torch.tensor(1)}, tag={"status": "success"})
    queue.kv_clear("a", "train")
    queue.kv_put("a", "train", fields={"x": torch.tensor(2)})
    assert queue.kv_list("train") == {"train": {"a": {}}}
    assert names(queue.kv_batch_get("a", "train")) == {"x"}


def test_list_is_in_the_order_keys_were_created(queue):
    """A key that was cleared and comes back is the last."""
    queue.kv_batch_put(["b", "a", "c"], "train", tags=[{}, {}, {}])
    queue.kv_put("b", "train", tag={"x": 1})
    assert list(queue.kv_list("train")["train"]) == ["b", "a", "c"]
    queue.kv_clear("b", "train")
    queue.kv_put("b", "train", tag={})
    assert list(queue.kv_list("train")["train"]) == ["a", "c", "b"]


def test_tags_listed_are_copies(queue):
    """Changing what was listed, put or returned changes nothing in the store."""
    tag = {"x": [1]}
    meta = queue.kv_put("a", "train", tag=tag)
    listed = queue.kv_list("train")["train"]["a"]
    for one in (tag, meta.tags[0], listed):
        one["x"].append(2)
    assert queue.kv_list("train") == {"train": {"a": {"x": [1]}}}


def test_a_key_with_tags_only_has_no_fields(queue):
    """Its batch lists none, and a get finds no field that all keys have."""
    assert queue.kv_put("a", "train", tag={"x": 1}).fields == []
    with pytest.raises(ValueError, match="Some fields are not ready in all the requested keys!"):
        queue.kv_batch_get(["a"], "train")


def test_get_by_meta_takes_its_fields(queue):
    """A batch fetches the fields it lists, or named ones among them; others are an error, as is no partition."""
    queue.kv_batch_put(["a"], "train", batch(x=torch.tensor([1]), y=torch.tensor([2])))
    meta = KVBatchMeta(["a"], [{}], "train", ["x"])
    assert names(queue.kv_batch_get_by_meta(meta)) == {"x"}
    assert names(queue.kv_batch_get_by_meta(meta, "x")) == {"x"}
    with pytest.raises(ValueError, match="not found in the metadata"):
        queue.kv_batch_get_by_meta(meta, ["y"])
    with pytest.raises(ValueError, match="partition_id"):
        queue.kv_batch_get_by_meta(KVBatchMeta(["a"], [{}], None, ["x"]))


def test_async_twins_do_the_same(queue):
    """Every asynchronous function gives what its synchronous twin gives."""

    async def life() -> None:
        await queue.async_kv_put("p", "train", tag={"is_prompt": True})
        meta = await queue.async_kv_batch_put(["a", "b"], "train", batch(x=torch.tensor([1, 2])), [{"i": 0}, {"i": 1}])
        assert [tag["i"] for tag in meta.tags] == [0, 1]
        assert (await queue.async_kv_batch_get(["b"], "train", "x"))["x"].tolist() == [2]
        assert (await queue.async_kv_batch_get_by_meta(meta))["x"].tolist() == [1, 2]
        assert await queue.async_kv_list("train") == queue.kv_list("train")
        await queue.async_kv_clear(["a", "b", "p"], "train")
        assert await queue.async_kv_list() == {"train": {}}

    asyncio.run(life())


ROW = st.lists(st.integers(0, 9), max_size=3)
OPERATIONS = st.lists(st.tuples(st.sampled_from(["put", "tag", "clear"]), st.sampled_from("abc"), ROW), max_size=12)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(OPERATIONS)
def test_any_history_agrees_with_a_plain_dict(queue, operations):
    """After any sequence of puts, tags and clears the store holds what a dict of dicts would."""
    queue.kv_clear(list("abc"), "train")
    tags: dict[str, dict[str, int]] = {}
    values: dict[str, list[int]] = {}
    for op, key, row in operations:
        if op == "clear":
            queue.kv_clear(key, "train")
            tags.pop(key, None)
            values.pop(key, None)
            continue
        tags.setdefault(key, {})
        if op == "tag":
            queue.kv_put(key, "train", tag={str(len(row)): len(row)})
            tags[key][str(len(row))] = len(row)
        else:
            queue.kv_batch_put([key], "train", batch(x=nested_from_list([torch.tensor(row, dtype=torch.int64)])))
            values[key] = row
    assert queue.kv_list("train").get("train", {}) == tags
    if values:
        assert rows_of(queue.kv_batch_get(list(values), "train", "x"), "x") == list(values.values())


# ---------------------------------------------------------------------------------------------- slots, resident, rest


def test_slots_belong_to_keys_that_live(queue):
    """A key's slot is its own while it lives, stays when it is written again, and is -1 when unknown."""
    queue.kv_batch_put(["a", "b"], "train", tags=[{}, {}])
    first, second = queue.global_indexes(["a", "b"], "train")
    assert first != second
    queue.kv_put("b", "train", fields={"x": torch.tensor(1)})
    queue.kv_clear("a", "train")
    assert queue.global_indexes(["a", "b"], "train") == [-1, second]
    assert queue.global_indexes(["b", "a", "b"], "train") == [second, -1, second]
    assert queue.global_indexes(["b"], "elsewhere") == [-1]
    assert queue.global_indexes([], "train") == []


def test_a_slot_is_given_out_again_after_a_clear(queue):
    """Another key, of another partition even, gets the slot of a cleared one: time tells them apart, slots do not."""
    queue.kv_batch_put(["a", "b"], "train", tags=[{}, {}])
    (cleared,) = queue.global_indexes(["a"], "train")
    queue.kv_clear("a", "train")
    later = [f"k{row}" for row in range(64)]
    queue.kv_batch_put(later, "val", tags=[{}] * len(later))
    assert cleared in queue.global_indexes(later, "val")


def test_resident_counts_prompts_and_trajectories(queue):
    """Keys tagged is_prompt and the others, of every partition; nothing after everything is cleared."""
    queue.kv_put("p", "train", tag={"is_prompt": True})
    queue.kv_batch_put(["a", "b"], "val", batch(x=torch.zeros(2, 3)))
    assert queue.resident()[:2] == (1, 2)
    queue.kv_clear("p", "train")
    queue.kv_clear(["a", "b"], "val")
    assert queue.resident()[:2] == (0, 0)


def test_the_low_level_client_reads_and_writes_by_slot(queue):
    """Workers that know slots only get and put the same rows, and slots lead back to keys."""

    async def life() -> None:
        await queue.async_kv_batch_put(["a", "b"], "train", batch(x=torch.tensor([1, 2])), [{"i": 0}, {"i": 1}])
        client = queue.get_client()
        meta = await client.async_kv_retrieve_meta(["b", "a", "z"], "train")
        assert [tag["i"] for tag in meta.custom_meta] == [1, 0]
        assert (await client.async_get_data(meta.select_fields(["x", "nope"])))["x"].tolist() == [2, 1]
        first, second = meta.chunk(2)
        assert (first.size, second.size, first.is_ready) == (1, 1, True)
        await client.async_put(batch(y=torch.tensor([5, 6])), meta)
        assert queue.kv_batch_get(["a", "b"], "train", "y")["y"].tolist() == [6, 5]
        assert await client.async_kv_retrieve_keys([*meta.global_indexes, 10**6], "train") == ["b", "a", None]
        created = await client.async_kv_retrieve_meta("c", "train", create=True)
        assert (created.size, created.is_ready) == (1, False)

    asyncio.run(life())


def test_a_parser_replaces_values_before_they_are_stored(queue):
    """data_parser sees columns, changes them in place and returns them."""

    def double(columns: dict[str, Any]) -> dict[str, Any]:
        columns["x"] = [row * 2 for row in columns["x"]]
        return columns

    queue.kv_batch_put(["a"], "train", batch(x=torch.tensor([3])), data_parser=double)
    assert queue.kv_batch_get("a", "train")["x"].tolist() == [6]
    with pytest.raises(RuntimeError, match="data_parser must return a dict, got NoneType"):
        queue.kv_batch_put(["a"], "train", batch(x=torch.tensor([3])), data_parser=lambda columns: None)


def test_plain_functions_work_inside_a_running_loop(queue):
    """A step that is a coroutine may call them, and another loop later finds the same store."""

    async def life() -> list[int]:
        queue.kv_batch_put(["a"], "train", batch(x=torch.tensor([1])))
        found = await queue.async_kv_batch_get(["a"], "train")
        assert queue.kv_batch_get(["a"], "train")["x"].tolist() == found["x"].tolist()
        return found["x"].tolist()

    assert [asyncio.run(life()), asyncio.run(life())] == [[1], [1]]


def test_many_at_once_in_one_loop(queue):
    """Sessions put and get in parallel; each finds its own row."""

    async def session(row: int) -> bool:
        key = f"k{row}"
        await queue.async_kv_batch_put([key], "train", batch(x=nested([float(row)] * (row + 1))), [{"row": row}])
        found = await queue.async_kv_batch_get(key, "train")
        return rows_of(found, "x") == [[float(row)] * (row + 1)]

    async def life() -> list[bool]:
        return list(await asyncio.gather(*(session(row) for row in range(16))))

    assert all(asyncio.run(life()))
    assert {key: tag["row"] for key, tag in queue.kv_list("train")["train"].items()} == {
        f"k{row}": row for row in range(16)
    }


def test_the_count_of_threads_is_the_callers(queue):
    """No put or get changes how many threads torch computes with."""
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        queue.kv_batch_put(["a"], "train", batch(x=torch.ones(1, 2)))
        queue.kv_batch_get(["a"], "train")
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
