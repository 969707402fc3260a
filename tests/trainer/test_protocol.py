"""DataProto, KVBatchMeta and the way between jagged and padded: no row loses its length."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from lineage.trainer.protocol import (
    DataProto,
    KVBatchMeta,
    lengths_of,
    nested_from_list,
    nested_to_padded,
    object_array,
    padded_to_nested,
    response_window,
    valid_mask,
)

ROWS = st.lists(st.lists(st.integers(-9, 9), max_size=6), min_size=1, max_size=5)
KEYS = st.lists(st.text("abc_0", min_size=1, max_size=4), unique=True, max_size=8)


def nested(rows: list[list[int]]) -> torch.Tensor:
    """Rows as a jagged int64 tensor."""
    return nested_from_list([torch.tensor(row, dtype=torch.int64) for row in rows])


def rows_of(tensor: torch.Tensor) -> list[list[int]]:
    """A jagged tensor's rows as lists."""
    return [row.tolist() for row in tensor.unbind()]


def meta_of(keys: list[str]) -> KVBatchMeta:
    """A batch whose tags name their keys."""
    return KVBatchMeta(keys, [{"name": key} for key in keys], "train", ["x"], {"step": 1})


# ------------------------------------------------------------------------------------------------ nested and padded


@given(ROWS, st.sampled_from(["left", "right"]), st.integers(0, 3), st.integers(-1, 1))
def test_padding_and_back_is_the_identity(rows, side, extra, padding):
    """Rows of any length, empty ones too, come back from either side's padding as they were."""
    tensor = nested(rows)
    width = max(map(len, rows)) + extra
    padded = nested_to_padded(tensor, side=side, padding=padding, width=width)
    assert padded.shape == (len(rows), width)
    assert rows_of(padded_to_nested(padded, lengths_of(tensor), side=side)) == rows


@given(ROWS, st.sampled_from(["left", "right"]))
def test_padding_lies_on_its_side(rows, side):
    """Outside the valid mask is nothing but the padding value, and the mask has the rows' lengths."""
    tensor = nested(rows)
    padded = nested_to_padded(tensor, side=side, padding=77)
    mask = valid_mask(lengths_of(tensor), padded.shape[1], side=side)
    assert mask.sum(1).tolist() == list(map(len, rows))
    assert padded[~mask].tolist() == [77] * int((~mask).sum())
    for row, line in zip(rows, padded.tolist(), strict=True):
        assert (line[len(line) - len(row) :] if side == "left" else line[: len(row)]) == row


def test_inner_dimensions_survive():
    """Rows of vectors keep their inner size."""
    tensor = nested_from_list([torch.ones(2, 3), torch.zeros(0, 3), torch.ones(1, 3)])
    padded = nested_to_padded(tensor)
    assert padded.shape == (3, 2, 3)
    assert rows_of(padded_to_nested(padded, lengths_of(tensor))) == rows_of(tensor)


def test_a_row_that_does_not_fit_is_refused():
    """A width shorter than the longest row, or lengths beyond the width, are errors and never a cut."""
    with pytest.raises(ValueError, match="does not fit"):
        nested_to_padded(nested([[1, 2, 3]]), width=2)
    with pytest.raises(ValueError, match="longer than the padded width"):
        padded_to_nested(torch.zeros(1, 2), torch.tensor([3]))


def test_unknown_side_is_refused():
    """Padding goes left or right."""
    with pytest.raises(ValueError, match="neither"):
        nested_to_padded(nested([[1]]), side="middle")


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=5))
def test_response_window_is_shifted_by_one(sizes):
    """The value of response token i is the one at sequence position prompt_len + i - 1."""
    sequences = [list(range(100 * row, 100 * row + p + r)) for row, (p, r) in enumerate(sizes)]
    prompts, seqs = torch.tensor([p for p, _ in sizes]), torch.tensor([p + r for p, r in sizes])
    expected = [[sequence[p + i - 1] for i in range(r)] for sequence, (p, r) in zip(sequences, sizes, strict=True)]
    assert rows_of(response_window(nested(sequences), prompts, seqs)) == expected


def test_response_window_refuses_an_empty_prompt():
    """No position predicts the first token after an empty prompt: verl's silent shift by a row is an error."""
    with pytest.raises(ValueError, match="row 1 has an empty prompt"):
        response_window(nested([[1, 2], [3]]), torch.tensor([1, 0]), torch.tensor([2, 1]))


def test_response_window_refuses_other_lengths():
    """Values that are not as long as their sequence are not cut."""
    with pytest.raises(ValueError, match="beside sequences"):
        response_window(nested([[1, 2]]), torch.tensor([1]), torch.tensor([3]))


# -------------------------------------------------------------------------------------------------------- DataProto


def proto() -> DataProto:
    """Three rows of a tensor and an object field."""
    columns = {"x": torch.arange(6).reshape(3, 2), "name": np.array(["a", "b", "c"], dtype=object)}
    return DataProto.from_dict(columns, {"step": 1})


def test_from_dict_sorts_tensors_from_the_rest():
    """Tensors go to the batch, everything else to object arrays."""
    data = proto()
    assert list(data.batch.keys()) == ["x"]
    assert data.non_tensor_batch["name"].tolist() == ["a", "b", "c"]
    assert (len(data), data.meta_info) == (3, {"step": 1})


def test_rows_of_unequal_number_are_refused():
    """An object array of another length than the tensors is an error."""
    with pytest.raises(ValueError, match="'name' has 2 rows"):
        DataProto(TensorDict({"x": torch.zeros(3)}, [3]), {"name": object_array(["a", "b"])})


@pytest.mark.parametrize("rows", [[2, 0], torch.tensor([2, 0]), np.array([2, 0])])
def test_indexing_takes_both_kinds_of_field(rows):
    """Rows picked by position stay together."""
    picked = proto()[rows]
    assert picked.batch["x"].tolist() == [[4, 5], [0, 1]]
    assert picked.non_tensor_batch["name"].tolist() == ["c", "a"]


def test_indexing_by_mask_and_slice():
    """A boolean mask and a slice pick the same rows from both kinds of field."""
    for rows in (torch.tensor([False, True, True]), slice(1, 3)):
        assert proto()[rows].non_tensor_batch["name"].tolist() == ["b", "c"]
        assert proto()[rows].batch["x"].tolist() == [[2, 3], [4, 5]]


def test_reorder_chunk_concat():
    """Chunks of a reordered batch, put together again, are the reordered batch."""
    data = proto()
    data.reorder([2, 0, 1])
    joined = DataProto.concat(data.chunk(3))
    assert joined.non_tensor_batch["name"].tolist() == ["c", "a", "b"]
    assert joined.batch["x"].tolist() == data.batch["x"].tolist()
    with pytest.raises(ValueError, match="do not divide"):
        data.chunk(2)


def test_select_and_union():
    """Selected fields keep their rows; a union needs as many."""
    only = proto().select(["name"])
    assert list(only.batch.keys()) == []
    assert only.union(proto().select(["x"])).batch["x"].shape == (3, 2)
    with pytest.raises(ValueError, match="cannot unite"):
        proto().union(proto()[[0]])


def test_from_tensordict_pads_prompts_left_and_the_rest_right():
    """What a queue returns becomes padded tensors, object arrays and meta_info, and the way back keeps the lengths."""
    fields = {
        "prompts": nested([[1], [2, 3]]),
        "responses": nested([[4, 5], [6]]),
        "score": torch.tensor([0.5, 1.0]),
        "uid": NonTensorStack("a", "b"),
        "temperature": NonTensorData(0.7),
    }
    data = DataProto.from_tensordict(TensorDict(fields, [2]), widths={"responses": 3}, padding={"prompts": 9})
    assert data.batch["prompts"].tolist() == [[9, 1], [2, 3]]
    assert data.batch["responses"].tolist() == [[4, 5, 0], [6, 0, 0]]
    assert data.batch["score"].tolist() == [0.5, 1.0]
    assert data.non_tensor_batch["uid"].tolist() == ["a", "b"]
    assert data.meta_info == {"temperature": 0.7}
    back = data.to_nested(["responses"], torch.tensor([2, 1]))
    assert rows_of(back["responses"]) == [[4, 5], [6]]


def test_object_array_keeps_lists_whole():
    """Lists of equal length stay one object a row."""
    assert object_array([[1, 2], [3, 4]]).shape == (2,)


# ------------------------------------------------------------------------------------------------------ KVBatchMeta


@given(KEYS, st.integers(1, 4))
def test_chunks_put_together_are_the_batch(keys, chunks):
    """Chunk then concat changes neither keys nor tags, and the parts differ by at most one row."""
    parts = meta_of(keys).chunk(chunks)
    sizes = [part.size for part in parts]
    assert len(parts) == chunks
    assert max(sizes) - min(sizes) <= 1
    joined = KVBatchMeta.concat(parts)
    assert (joined.keys, joined.tags) == (keys, [{"name": key} for key in keys])


@given(KEYS.flatmap(lambda keys: st.tuples(st.just(keys), st.permutations(range(len(keys))))))
def test_reorder_keeps_tags_beside_their_keys(case):
    """After any reorder each tag still belongs to its key."""
    keys, order = case
    meta = meta_of(keys)
    meta.reorder(order)
    assert meta.keys == [keys[place] for place in order]
    assert [tag["name"] for tag in meta.tags] == meta.keys


@given(KEYS.flatmap(lambda keys: st.tuples(st.just(keys), st.lists(st.sampled_from(keys or ["x"]), unique=True))))
def test_select_keys_in_the_order_asked(case):
    """Selected keys come in the order asked, each with its own tag."""
    keys, wanted = case
    picked = meta_of(keys or ["x"]).select_keys(wanted)
    assert picked.keys == wanted
    assert [tag["name"] for tag in picked.tags] == wanted
    assert (picked.partition_id, picked.fields, picked.extra_info) == ("train", ["x"], {"step": 1})


def test_tags_and_extra_info_are_copied_deeply():
    """Changing what was passed in changes nothing inside."""
    tag, extra = {"inner": [1]}, {"inner": [1]}
    meta = KVBatchMeta(["a"], [tag], extra_info=extra)
    tag["inner"].append(2)
    extra["inner"].append(2)
    assert (meta.tags, meta.extra_info) == ([{"inner": [1]}], {"inner": [1]})


def test_keys_must_be_distinct_and_each_have_a_tag():
    """A key twice, or as many tags as keys missing, is an error."""
    with pytest.raises(ValueError, match=r"Got duplicated keys\."):
        KVBatchMeta(["a", "a"], [{}, {}])
    with pytest.raises(ValueError, match="same length"):
        KVBatchMeta(["a"], [])


def test_select_and_reorder_refuse_what_is_not_there():
    """Unknown and repeated keys, and orders that are no permutation, are errors."""
    meta = meta_of(["a", "b"])
    with pytest.raises(RuntimeError, match="not found"):
        meta.select_keys(["z"])
    with pytest.raises(ValueError, match="duplicated"):
        meta.select_keys(["a", "a"])
    with pytest.raises(ValueError, match="not a permutation"):
        meta.reorder([0, 0])


def test_concat_refuses_other_partitions_fields_and_repeated_keys():
    """Only batches of one partition with the same fields and different keys go together."""
    meta = meta_of(["a"])
    with pytest.raises(ValueError, match="different partitions"):
        KVBatchMeta.concat([meta, KVBatchMeta(["b"], [{}], "val", ["x"])])
    with pytest.raises(ValueError, match="different fields"):
        KVBatchMeta.concat([meta, KVBatchMeta(["b"], [{}], "train", ["y"])])
    with pytest.raises(ValueError, match="duplicated"):
        KVBatchMeta.concat([meta, meta])
    assert KVBatchMeta.concat([]).size == 0
