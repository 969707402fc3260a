"""TransferQueue's interface and its measured semantics, against any store that claims them.

Every test takes the ``queue`` fixture: an object with TransferQueue's functions (``kv_put``, ``async_kv_put`` ...). Add
a factory to ``FACTORIES`` (the real package's module, after ``init``) and the same laws are checked there. What only
the local store offers is in the last section.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from lineage.trainer.protocol import KVBatchMeta, nested_from_list
from lineage.trainer.queue import LocalTransferQueue

FACTORIES = {"local": LocalTransferQueue}


@pytest.fixture(params=list(FACTORIES))
def queue(request: pytest.FixtureRequest) -> Iterator[Any]:
    """An empty store of the interface."""
    store = FACTORIES[request.param]()
    store.init()
    yield store
    store.close()


def nested(*rows: list[float]) -> torch.Tensor:
    """Rows as a jagged tensor."""
    return nested_from_list([torch.tensor(row) for row in rows])


def batch(**fields: Any) -> TensorDict:
    """Fields as a TensorDict of their length."""
    return TensorDict(fields, batch_size=[len(next(iter(fields.values())))])


def rows_of(data: TensorDict, field: str) -> list[list[float]]:
    """Rows of a jagged field as lists."""
    return [row.tolist() for row in data[field].unbind()]


def names(data: TensorDict) -> set[str]:
    """Fields of a batch."""
    return set(data.keys())


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


# ------------------------------------------------------------------------------------------------------------ shapes


def test_rows_of_one_dimension_come_back_jagged(queue):
    """Dense rows of equal length come back as a jagged tensor all the same."""
    queue.kv_batch_put(["a", "b"], "train", batch(x=torch.ones(2, 3)))
    data = queue.kv_batch_get(["a", "b"], "train")["x"]
    assert data.is_nested
    assert data.offsets().tolist() == [0, 3, 6]


def test_rows_without_dimension_come_back_stacked(queue):
    """One number a row comes back as a dense tensor."""
    queue.kv_batch_put(["a", "b"], "train", batch(x=torch.tensor([1.0, 2.0])))
    data = queue.kv_batch_get(["a", "b"], "train")["x"]
    assert not data.is_nested
    assert data.tolist() == [1.0, 2.0]


def test_empty_rows_survive(queue):
    """A row of length 0 keeps its place."""
    queue.kv_batch_put(["a", "b"], "train", batch(x=nested([], [1.0, 2.0])))
    assert queue.kv_batch_get(["a", "b"], "train")["x"].offsets().tolist() == [0, 0, 2]


def test_objects_come_back_as_objects(queue):
    """Strings, None, lists and dicts survive, one a row."""
    words = ["word", None, [1, 2], {"k": "v"}]
    queue.kv_batch_put(list("abcd"), "train", batch(o=NonTensorStack(*words)))
    assert queue.kv_batch_get(list("abcd"), "train").get("o").tolist() == words


def test_kv_put_of_a_dict_adds_the_batch_dimension(queue):
    """A dict holds one row: tensors and objects without a batch dimension."""
    queue.kv_put("a", "train", fields={"x": torch.tensor([1, 2]), "n": torch.tensor(3), "o": {"k": 1}})
    data = queue.kv_batch_get(["a"], "train")
    assert rows_of(data, "x") == [[1, 2]]
    assert data["n"].tolist() == [3]
    assert data.get("o").tolist() == [{"k": 1}]


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


# ------------------------------------------------------------------------------------------ what the local one adds


@pytest.fixture
def local() -> LocalTransferQueue:
    """An empty in-process store."""
    return LocalTransferQueue()


def test_slots_are_given_out_again_after_a_clear(local):
    """A key's slot is unique while it lives, goes to the next new key after its clear, and is -1 when unknown."""
    local.kv_batch_put(["a", "b"], "train", tags=[{}, {}])
    first, second = local.global_indexes(["a", "b"], "train")
    assert first != second
    local.kv_clear("a", "train")
    local.kv_put("c", "val", tag={})
    assert local.global_indexes(["c"], "val") == [first]
    assert local.global_indexes(["a", "b"], "train") == [-1, second]


def test_resident_counts_keys_and_bytes(local):
    """Prompt keys, trajectory keys and the bytes of tensors and strings; nothing after everything is cleared."""
    local.kv_put("p", "train", tag={"is_prompt": True})
    local.kv_batch_put(["a", "b"], "train", batch(x=torch.zeros(2, 3), o=NonTensorStack("ab", {"k": 1})))
    assert local.resident() == (1, 2, 2 * 3 * 4 + 2)
    local.kv_clear(["p", "a", "b"], "train")
    assert local.resident() == (0, 0, 0)


def test_the_low_level_client_reads_and_writes_by_slot(local):
    """Workers that know slots only get and put the same rows, and slots lead back to keys."""

    async def life() -> None:
        local.kv_batch_put(["a", "b"], "train", batch(x=torch.tensor([1, 2])), [{"i": 0}, {"i": 1}])
        client = local.get_client()
        meta = await client.async_kv_retrieve_meta(["b", "a", "z"], "train")
        assert [tag["i"] for tag in meta.custom_meta] == [1, 0]
        assert (await client.async_get_data(meta.select_fields(["x", "nope"])))["x"].tolist() == [2, 1]
        first, second = meta.chunk(2)
        assert (first.size, second.size, first.is_ready) == (1, 1, True)
        await client.async_put(batch(y=torch.tensor([5, 6])), meta)
        assert local.kv_batch_get(["a", "b"], "train", "y")["y"].tolist() == [6, 5]
        assert await client.async_kv_retrieve_keys([*meta.global_indexes, 99], "train") == ["b", "a", None]
        created = await client.async_kv_retrieve_meta("c", "train", create=True)
        assert (created.size, created.is_ready) == (1, False)

    asyncio.run(life())


def test_a_parser_replaces_values_before_they_are_stored(local):
    """data_parser sees columns and changes them in place."""

    def double(columns: dict[str, Any]) -> None:
        columns["x"] = [row * 2 for row in columns["x"]]

    local.kv_batch_put(["a"], "train", batch(x=torch.tensor([3])), data_parser=double)
    assert local.kv_batch_get("a", "train")["x"].tolist() == [6]


def test_init_and_close_start_empty(local):
    """Nothing survives init or close."""
    local.kv_put("a", "train", tag={})
    assert local.init({"controller": 1}) == {"controller": 1}
    assert local.kv_list() == {}
    local.kv_put("a", "train", tag={})
    local.close()
    assert local.kv_list() == {}
