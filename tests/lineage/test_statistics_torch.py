"""The torch twin gives the bits of the numpy statistics."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lineage.statistics import Rows, row_statistics
from lineage.statistics.with_torch import TensorStatistics, tensor_statistics

DTYPES = {
    "int64": (st.integers(-(2**52), 2**52), np.int64),
    "int32": (st.integers(-(2**31), 2**31 - 1), np.int32),
    "bool": (st.booleans(), bool),
    "float32": (st.floats(width=32), np.float32),
    "float16": (st.floats(width=16), np.float16),
    "bfloat16": (st.floats(width=16), np.float32),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@given(st.data())
def test_torch_and_numpy_give_the_same_bits(data: st.DataObject) -> None:
    """Every statistic of jagged rows, subnormals, infinities and NaN included, with and without a mask."""
    name = data.draw(st.sampled_from(sorted(DTYPES)))
    elements, dtype = DTYPES[name]
    lists = data.draw(st.lists(st.lists(elements, max_size=40), min_size=1, max_size=5))
    lengths = np.array([len(row) for row in lists], dtype=np.int64)
    tensor = torch.tensor([v for row in lists for v in row], dtype=getattr(torch, name))
    values = tensor.float().numpy() if name == "bfloat16" else tensor.numpy().astype(dtype)
    mask = (
        np.array([data.draw(st.booleans()) for _ in range(len(values))], dtype=bool)
        if data.draw(st.booleans())
        else None
    )
    expected = row_statistics(Rows(values, lengths, mask=mask))
    got = tensor_statistics(tensor, torch.from_numpy(lengths), None if mask is None else torch.from_numpy(mask))
    for field in fields(TensorStatistics):
        twin, column = getattr(got, field.name), getattr(expected, field.name)
        if column is None:
            assert twin is None
            continue
        assert _bits(twin.numpy()) == _bits(column), field.name


def _bits(column: np.ndarray) -> list[int]:
    """64-bit patterns, with one NaN: which of them an operation gives is the processor's choice."""
    if column.dtype.kind == "f":
        column = np.where(np.isnan(column), np.float64("nan"), column)
    return column.view(np.uint64).tolist()
