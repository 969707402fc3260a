"""Any field of a batch as a snapshot on the host: what is recorded cannot change after the call.

Takes torch tensors (dense, jagged, nested in the strided layout, on any device), numpy arrays, lists of numbers,
tensors, strings and objects. Torch is never imported: a tensor is known by its own module, which the caller has loaded.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lineage.fingerprint import canonical_json

Int64 = NDArray[np.int64]


@dataclass
class FrozenTensor:
    """A dense tensor: ``(batch, ...)`` values with what the container said of itself."""

    array: NDArray[Any]
    dtype: str
    device: str | None = None
    requires_grad: bool | None = None

    def __reduce__(self) -> Any:
        """Pickled as plain bytes: a step has hundreds of small arrays, and numpy's own way costs several times that."""
        array = self.array
        packed = (array.tobytes(), array.dtype.str, array.shape)
        return _tensor_from, (*packed, self.dtype, self.device, self.requires_grad)


@dataclass
class FrozenNested:
    """Rows of different lengths.

    Attributes:
        values: ``(sum(lengths), ...)``, row after row, the ragged axis outermost.
        lengths: ``(batch,)`` positions of each row.
    """

    values: NDArray[Any]
    lengths: Int64
    dtype: str
    device: str | None = None
    requires_grad: bool | None = None

    def __reduce__(self) -> Any:
        """Pickled as plain bytes, as :class:`FrozenTensor` is."""
        values = self.values
        packed = (values.tobytes(), values.dtype.str, values.shape, self.lengths.tobytes())
        return _nested_from, (*packed, self.dtype, self.device, self.requires_grad)


@dataclass
class FrozenObjects:
    """Strings as UTF-8 (dtype ``str``), other objects as canonical JSON (dtype ``object``)."""

    blobs: list[bytes]
    dtype: str


Frozen = FrozenTensor | FrozenNested | FrozenObjects


def _tensor_from(data: bytes, code: str, shape: tuple[int, ...], *said: Any) -> FrozenTensor:
    return FrozenTensor(np.frombuffer(data, dtype=code).reshape(shape), *said)


def _nested_from(data: bytes, code: str, shape: tuple[int, ...], lengths: bytes, *said: Any) -> FrozenNested:
    return FrozenNested(np.frombuffer(data, dtype=code).reshape(shape), np.frombuffer(lengths, dtype=np.int64), *said)


def freeze(value: Any, *, copy: bool = True) -> Frozen:
    """Take a snapshot of one field.

    Args:
        value: tensor, array or list, one row an element of its first axis.
        copy: False may keep a view of the value's memory, for a caller that is done with it before it can change.
    """
    if isinstance(value, (FrozenTensor, FrozenNested, FrozenObjects)):
        return value
    if is_tensor(value):
        if is_jagged(value):
            return _jagged(value, copy)
        if value.is_nested:  # nested in the strided layout: rows of any shape
            return _rows([to_numpy(row, copy=False) for row in value.unbind()], value)
        if value.is_complex():
            raise ValueError("complex tensors are not recorded")
        return FrozenTensor(
            to_numpy(value, copy=copy), _dtype_name(value), str(value.device), bool(value.requires_grad)
        )
    if hasattr(value, "tolist") and not isinstance(value, np.ndarray):
        value = value.tolist()  # tensordict's NonTensorStack
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        return FrozenTensor(np.array(value, order="C", copy=copy or None), str(value.dtype))
    rows = list(value) if isinstance(value, (list, tuple, np.ndarray)) else [value]
    if rows and all(_is_number(row) for row in rows):
        array = np.asarray(rows)
        if array.dtype.kind in "fiub":  # integers beyond 64 bits stay objects
            return FrozenTensor(array, str(array.dtype))
    if rows and all(isinstance(row, str) for row in rows):
        return FrozenObjects([row.encode("utf-8", "surrogatepass") for row in rows], "str")
    if rows and all(is_tensor(row) or (isinstance(row, np.ndarray) and row.dtype.kind in "fiub") for row in rows):
        return _rows([to_numpy(row, copy=False) if is_tensor(row) else row for row in rows], rows[0])
    if rows and all(isinstance(row, (list, tuple)) and all(_is_number(x) for x in row) for row in rows):
        dtype = np.float64 if any(isinstance(x, (float, np.floating)) for row in rows for x in row) else np.int64
        try:
            return _rows([np.asarray(row, dtype=dtype) for row in rows], None)
        except OverflowError:  # integers beyond 64 bits stay objects
            pass
    return FrozenObjects([canonical_json(row) for row in rows], "object")


def is_tensor(value: Any) -> bool:
    """True for a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_jagged(tensor: Any) -> bool:
    """True for a nested tensor in the jagged layout.

    Its properties cost a Python dispatch each, so the class is looked at and the parts are read directly.
    """
    return hasattr(type(tensor), "__tensor_flatten__") and hasattr(tensor, "_offsets")


def to_numpy(tensor: Any, *, copy: bool = True) -> NDArray[Any]:
    """A tensor's content on the host; bfloat16, which numpy lacks, as float32.

    Args:
        tensor: any dense tensor.
        copy: False may give a view of the tensor's memory.
    """
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        tensor, copy = tensor.cpu(), False
    try:
        array = tensor.numpy()
    except TypeError:
        array, copy = tensor.float().numpy(), False
    return np.array(array, order="C") if copy else np.ascontiguousarray(array)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.bool_, np.integer, np.floating))


def _dtype_name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _jagged(tensor: Any, copy: bool) -> FrozenNested:
    values, ragged_axis, holes = tensor._values, tensor._ragged_idx - 1, tensor._lengths
    with sys.modules["torch"]._C.DisableTorchFunctionSubclass():
        requires_grad = bool(tensor.requires_grad)
    if ragged_axis:
        values = values.movedim(ragged_axis, 0)
    array = to_numpy(values, copy=copy)
    offsets = to_numpy(tensor._offsets, copy=False)
    lengths = (offsets[1:] - offsets[:-1]).astype(np.int64)
    if holes is not None:  # rows narrowed in place: what lies between them is not theirs
        keep = to_numpy(holes).astype(np.int64)
        inside = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        array, lengths = array[: len(inside)][inside < np.repeat(keep, lengths)], keep
    return FrozenNested(array, lengths, _dtype_name(values), str(values.device), requires_grad)


def _rows(rows: list[NDArray[Any]], first: Any) -> Frozen:
    """Rows of any shape: scalars as one tensor, the rest flat, one after the other."""
    dtype = _dtype_name(first) if is_tensor(first) else str(rows[0].dtype)
    device = str(first.device) if is_tensor(first) else None
    requires_grad = bool(first.requires_grad) if is_tensor(first) else None
    if all(row.ndim == 0 for row in rows):
        return FrozenTensor(np.array([row.item() for row in rows], dtype=rows[0].dtype), dtype, device, requires_grad)
    lengths = np.fromiter((row.size for row in rows), dtype=np.int64, count=len(rows))
    return FrozenNested(np.concatenate([row.reshape(-1) for row in rows]), lengths, dtype, device, requires_grad)
