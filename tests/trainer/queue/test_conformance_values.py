"""Values as they come back, from the store in this process and from the real one: rows, layouts, dtypes, objects."""

from __future__ import annotations

import pytest
import torch
from columns_of import batch, nested, rows_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack

from lineage.trainer.protocol import nested_from_list, nested_tokens_last, tokens_last


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


@pytest.mark.parametrize("lengths", [(4, 4), (4, 2), (2, 2)])
def test_rows_of_several_axes_are_ragged_on_the_last(queue, lengths):
    """position_ids of two axes keep their axes together, equally long or not, as many columns as axes or not."""
    rows = [torch.arange(2 * length).reshape(2, length) for length in lengths]
    queue.kv_batch_put(["a", "b"], "train", batch(x=nested_tokens_last(rows)))
    for keys, expected in ((["a", "b"], rows), (["b"], rows[1:])):
        data = queue.kv_batch_get(keys, "train")["x"]
        assert tokens_last(data)
        assert all(torch.equal(row, one) for row, one in zip(data.unbind(), expected, strict=True))


def test_columns_of_the_same_lengths_share_their_offsets(queue):
    """What two fields of a batch hold can be added, as torch allows only of jagged tensors with the same offsets."""
    queue.kv_batch_put(["a", "b"], "train", batch(x=nested([1.0], [2.0, 3.0])))
    queue.kv_batch_put(["a", "b"], "train", batch(y=nested([1.0], [1.0, 1.0])))
    data = queue.kv_batch_get(["a", "b"], "train")
    assert [row.tolist() for row in (data["x"] + data["y"]).unbind()] == [[2.0], [3.0, 4.0]]


def test_a_tensor_with_a_gradient_is_stored_without_it(queue):
    """The graph of what is put does not come back."""
    queue.kv_batch_put(["a"], "train", batch(x=torch.ones(1, 2, requires_grad=True) * 2))
    data = queue.kv_batch_get(["a"], "train")["x"]
    assert not data.requires_grad
    assert rows_of(queue.kv_batch_get(["a"], "train"), "x") == [[2.0, 2.0]]


DTYPES = [torch.bool, torch.int32, torch.int64, torch.bfloat16, torch.float16, torch.float32, torch.float64]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(dtype=st.sampled_from(DTYPES), lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5), data=st.data())
def test_any_tensor_comes_back_bit_for_bit(queue, dtype, lengths, data):
    """Any dtype and lengths, any order of keys: the rows are the ones put, of their dtype, in jagged layout."""
    rows = [torch.randint(-9, 9, (length,)).to(dtype) for length in lengths]
    keys = [f"k{row}" for row in range(len(rows))]
    queue.kv_clear(keys, "train")
    queue.kv_batch_put(keys, "train", batch(x=nested_from_list(rows)))
    order = data.draw(st.permutations(range(len(rows))))
    found = queue.kv_batch_get([keys[row] for row in order], "train")["x"]
    assert (found.dtype, found.layout) == (dtype, torch.jagged)
    assert all(torch.equal(one, rows[row]) for one, row in zip(found.unbind(), order, strict=True))


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(values=st.lists(PLAIN, min_size=1, max_size=4))
def test_any_plain_object_comes_back_equal(queue, values):
    """As a field and as a tag, whatever is beside it in the batch."""
    keys = [f"k{row}" for row in range(len(values))]
    queue.kv_clear([f"k{row}" for row in range(4)], "train")
    queue.kv_batch_put(keys, "train", batch(o=NonTensorStack(*values)), [{"o": value} for value in values])
    assert queue.kv_batch_get(keys, "train").get("o").tolist() == values
    assert [tag["o"] for tag in queue.kv_list("train")["train"].values()] == values


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
