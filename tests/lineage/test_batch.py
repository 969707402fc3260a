"""Any container becomes the same columns: content, lengths, padding and masks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from lineage.batch import column, container_name, frozen_items, items_of, padding_of
from lineage.errors import UserError
from lineage.fingerprint import reference_fingerprint
from lineage.freeze import freeze
from lineage.gather import Gather, kinds_of
from lineage.statistics import row_statistics


def nested(rows: list[list[float]], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A jagged nested tensor."""
    return torch.nested.nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


def fingerprints(item: Any) -> list[int]:
    """Fingerprints of a column's rows."""
    return row_statistics(item.rows).fingerprint.tolist()


TOKENS = st.lists(st.lists(st.integers(1, 500), min_size=1, max_size=12), min_size=1, max_size=5)


@given(TOKENS)
def test_one_content_has_one_fingerprint_in_any_container(rows: list[list[int]]) -> None:
    """Nested, left padded, right padded, a list of lists and a list of tensors agree row by row."""
    lengths = [len(row) for row in rows]
    width = max(lengths) + 2
    right = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    left = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    told = padding_of({"prompts": freeze(left)}, {"prompt": lengths, "response": lengths}, ("prompts",))
    columns = [
        column("responses", nested(rows)),
        column("responses", right, told),
        column("prompts", left, told),
        column("responses", rows),
        column("responses", [torch.tensor(row) for row in rows]),
        column("responses", [np.array(row) for row in rows]),
    ]
    expected = [reference_fingerprint(row) for row in rows]
    for item in columns:
        assert fingerprints(item) == expected
        assert item.rows.valid_lengths.tolist() == lengths


def test_padding_is_read_from_the_attention_mask() -> None:
    """A DataProto-shaped batch without told lengths: prompt on the left, response on the right, one run of ones."""
    items = {
        "prompts": torch.tensor([[0, 7, 8], [4, 5, 6]]),
        "responses": torch.tensor([[9, 0], [1, 2]]),
        "input_ids": torch.tensor([[0, 7, 8, 9, 0], [4, 5, 6, 1, 2]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
    }
    padding = padding_of(frozen_items(items))
    assert fingerprints(column("prompts", items["prompts"], padding)) == [
        reference_fingerprint(row) for row in ([7, 8], [4, 5, 6])
    ]
    assert fingerprints(column("responses", items["responses"], padding)) == [
        reference_fingerprint(row) for row in ([9], [1, 2])
    ]
    assert fingerprints(column("input_ids", items["input_ids"], padding)) == [
        reference_fingerprint(row) for row in ([7, 8, 9], [4, 5, 6, 1, 2])
    ]


def test_bfloat16_keeps_its_values_and_its_name() -> None:
    """numpy has no bfloat16: the values are widened exactly and the dtype is still said."""
    item = column("old_log_probs", nested([[-0.5, -1.25], [-3.0]], torch.bfloat16))
    assert item.dtype == "bfloat16"
    assert item.rows.values.tolist() == [-0.5, -1.25, -3.0]


def test_position_ids_of_several_channels_have_the_token_axis_outermost() -> None:
    """A padded (batch, 2, seq) field has one position a token and its window is cut along the tokens."""
    positions = torch.tensor([[[0, 1, 2, 0], [5, 6, 7, 0]]])
    told = padding_of({}, {"sequence": [3]})
    item = column("position_ids", positions, told)
    assert item.width == 2
    assert fingerprints(item) == [reference_fingerprint([0, 5, 1, 6, 2, 7])]


def test_strings_and_objects_get_lengths_and_fingerprints() -> None:
    """A string is its UTF-8 bytes, an object its canonical JSON whatever the order of its keys."""
    text = column("data_source", np.array(["ab", "é"], dtype=object))
    assert text.dtype == "str"
    assert text.rows.lengths.tolist() == [2, 2]
    one = column("extra_info", NonTensorStack({"a": 1, "b": [2]}))
    other = column("extra_info", [{"b": [2], "a": 1}])
    assert fingerprints(one) == fingerprints(other)
    assert fingerprints(one) != fingerprints(column("extra_info", [{"a": 1, "b": [3]}]))


def test_a_narrowed_nested_tensor_leaves_the_holes_out() -> None:
    """Rows narrowed in place keep what is theirs, not what lies between them."""
    base = torch.arange(12).reshape(2, 6)
    narrowed = torch.nested.narrow(base, 1, torch.tensor([0, 2]), torch.tensor([3, 2]), layout=torch.jagged)
    assert fingerprints(column("responses", narrowed)) == [
        reference_fingerprint([0, 1, 2]),
        reference_fingerprint([8, 9]),
    ]


@dataclass
class DataProtoLike:
    """An object with DataProto's three parts."""

    batch: TensorDict | None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


def test_containers_are_known_by_their_shape() -> None:
    """DataProto-shaped objects, TensorDict and dict give their fields; anything else is refused in one line."""
    batch = TensorDict({"a": torch.ones(2)}, batch_size=[2])
    proto = DataProtoLike(batch, {"uid": np.array(["x", "y"], dtype=object)})
    assert [name for name, _ in items_of(proto)] == ["a", "uid"]
    assert (container_name(proto), container_name(batch), container_name({})) == ("DataProto", "TensorDict", "dict")
    with pytest.raises(UserError, match="cannot record a int"):
        list(items_of(3))


@given(TOKENS)
def test_gathered_sessions_equal_one_batch(rows: list[list[int]]) -> None:
    """Rows recorded one by one become the column of the whole batch."""
    together = {
        "responses": nested(rows),
        "uid": [f"u{len(row)}" for row in rows],
        "extra_fields": [{"n": len(row)} for row in rows],
        "num_turns": torch.tensor([len(row) for row in rows]),
        "raw": [torch.tensor(row) for row in rows],
    }
    gather: Gather | None = None
    for row in rows:
        one = {
            "responses": nested([row]),
            "uid": [f"u{len(row)}"],
            "extra_fields": [{"n": len(row)}],
            "num_turns": torch.tensor([len(row)]),
            "raw": [torch.tensor(row)],
        }
        items = frozen_items(one)
        kinds = kinds_of(items)
        assert kinds is not None
        gather = gather or Gather("produce", "trajectory", {}, kinds, 1, 0)
        gather.add(["k"], items, {"slot": [len(row)]})
    assert gather is not None
    for name, item in gather.fields().items():
        whole = column(name, together[name])
        assert fingerprints(item) == fingerprints(whole), name
        assert (item.layout, item.span, item.dtype, item.shape) == (whole.layout, whole.span, whole.dtype, whole.shape)
    assert gather.element_columns() == {"slot": [len(row) for row in rows]}
