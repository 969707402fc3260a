"""What moves between stages: DataProto (values, padded), KVBatchMeta (keys and tags, no values), and their shapes.

Values lie jagged in the queue and padded in the algorithm; the conversions here lose no row's true length. Prompts are
padded on the left, responses and everything of response or sequence span on the right (verl).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

LEFT_PADDED = ("prompts",)


# ---------------------------------------------------------------------------------------------- nested and padded


def nested_from_list(rows: Sequence[Tensor]) -> Tensor:
    """Rows of any length, 0 included, as one jagged tensor ``(batch, j)``; the values are copied."""
    lengths = torch.tensor([row.shape[0] for row in rows], dtype=torch.int64)
    return nested_from_values(torch.cat(list(rows)), lengths)


def nested_tokens_last(rows: Sequence[Tensor]) -> Tensor:
    """Rows ``(j)``, or ``(k, j)`` of one k (position_ids of several axes), as one jagged tensor, ragged on the last."""
    lengths = torch.tensor([row.shape[-1] for row in rows], dtype=torch.int64)
    values = torch.cat(list(rows), dim=-1)
    return torch.nested.nested_tensor_from_jagged(values, offsets_of(lengths), jagged_dim=values.dim())


def nested_from_values(values: Tensor, lengths: Tensor) -> Tensor:
    """Flat values ``(sum(lengths), ...)`` as a jagged tensor ``(batch, j, ...)`` sharing their memory."""
    return torch.nested.nested_tensor_from_jagged(values, offsets_of(lengths).to(values.device))


def tokens_last(nested: Tensor) -> bool:
    """True of a jagged tensor that is ragged on the second axis of its rows, which are ``(k, j)``."""
    return nested._ragged_idx == 2  # type: ignore[attr-defined]  # torch has no public name for it


def offsets_of(lengths: Tensor) -> Tensor:
    """Where each row begins in the flat values, and where the last one ends: int64 ``(batch + 1,)``."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def lengths_of(nested: Tensor) -> Tensor:
    """True length of each row of a jagged tensor, int64 ``(batch,)``."""
    return nested.offsets().diff()  # type: ignore[attr-defined]


def nested_to_padded(nested: Tensor, *, side: str = "right", padding: float = 0, width: int | None = None) -> Tensor:
    """Jagged ``(batch, j, ...)`` to dense ``(batch, width, ...)``, jagged ``(batch, k, j)`` to ``(batch, k, width)``.

    Args:
        side: where the padding goes, ``left`` or ``right``.
        padding: value of the padding.
        width: columns of the result; the longest row's length if None.

    Raises:
        ValueError: a row is longer than ``width``.
    """
    lengths, values = lengths_of(nested), nested.values()
    if tokens_last(nested):
        values = values.T
    longest = int(lengths.max()) if len(lengths) else 0
    width = longest if width is None else width
    if longest > width:
        raise ValueError(f"a row of {longest} elements does not fit a padded width of {width}")
    padded = values.new_full((len(lengths), width, *values.shape[1:]), padding)
    padded[valid_mask(lengths, width, side=side)] = values
    return padded.transpose(1, 2) if tokens_last(nested) else padded


def padded_to_nested(padded: Tensor, lengths: Tensor, *, side: str = "right") -> Tensor:
    """Dense ``(batch, width, ...)`` to jagged ``(batch, j, ...)``: the ``lengths[i]`` elements that are data."""
    if len(lengths) and int(lengths.max()) > padded.shape[1]:
        raise ValueError(f"a row of {int(lengths.max())} elements is longer than the padded width {padded.shape[1]}")
    return nested_from_values(padded[valid_mask(lengths, padded.shape[1], side=side)], lengths)


def valid_mask(lengths: Tensor, width: int, *, side: str = "right") -> Tensor:
    """Bool ``(batch, width)``, true on the data of rows padded on ``side``."""
    if side not in ("left", "right"):
        raise ValueError(f"side={side!r} is neither 'left' nor 'right'")
    position = torch.arange(width, device=lengths.device)
    column = lengths.unsqueeze(1)
    return position < column if side == "right" else position >= width - column


def response_window(sequence: Tensor, prompt_lens: Tensor, seq_lens: Tensor) -> Tensor:
    """Cut full-sequence values to the response (verl ``response_from_nested``).

    The value at position i belongs to token i+1 given its prefix, so a response's values are those at
    ``[prompt_len - 1 : seq_len - 1]``.

    Args:
        sequence: jagged ``(batch, seq_len)``.
        prompt_lens, seq_lens: int64 ``(batch,)``.

    Returns:
        Jagged ``(batch, response_len)``.

    Raises:
        ValueError: a prompt of length 0 has no position that predicts the first response token (verl 0.9.1 then
            silently takes the row before), or a row's values are not ``seq_len`` long.
    """
    lengths = lengths_of(sequence)
    if not torch.equal(lengths, seq_lens.to(lengths)):
        raise ValueError(f"values of {lengths.tolist()} elements beside sequences of {seq_lens.tolist()} tokens")
    if len(prompt_lens) and int(prompt_lens.min()) < 1:
        row = int(prompt_lens.argmin())
        raise ValueError(f"row {row} has an empty prompt: no position predicts its first response token")
    width = int(lengths.max()) if len(lengths) else 0
    position = torch.arange(width, device=lengths.device)
    inside = (position >= prompt_lens.unsqueeze(1) - 1) & (position < seq_lens.unsqueeze(1) - 1)
    flat = inside[valid_mask(lengths, width)]
    return nested_from_values(sequence.values()[flat], seq_lens - prompt_lens)


# ------------------------------------------------------------------------------------------------------- DataProto


@dataclass
class DataProto:
    """Rows as functions pass them on (verl ``DataProto``).

    Attributes:
        batch: tensors, every one ``(batch, ...)``.
        non_tensor_batch: object arrays ``(batch,)``.
        meta_info: facts of the whole batch.
    """

    batch: TensorDict
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, column in self.non_tensor_batch.items():
            if len(column) != len(self.batch):
                rows = len(self.batch)
                raise ValueError(f"non-tensor field {name!r} has {len(column)} rows, the tensors have {rows}")

    @classmethod
    def from_dict(cls, columns: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None) -> DataProto:
        """Columns of equal length: tensors go to ``batch``, the rest to ``non_tensor_batch`` (as from collate_fn)."""
        tensors = {name: column for name, column in columns.items() if isinstance(column, Tensor)}
        others = {name: object_array(column) for name, column in columns.items() if name not in tensors}
        rows = len(next(iter(columns.values()), ()))
        return cls(TensorDict(tensors, batch_size=[rows]), others, dict(meta_info or {}))

    @classmethod
    def from_tensordict(
        cls, data: TensorDict, *, widths: Mapping[str, int] | None = None, padding: Mapping[str, float] | None = None
    ) -> DataProto:
        """What a queue returns, padded: jagged fields become dense, non-tensors object arrays.

        Args:
            widths: padded width by field; the longest row otherwise.
            padding: padding value by field; 0 otherwise.
        """
        widths, padding = widths or {}, padding or {}
        tensors: dict[str, Tensor] = {}
        others: dict[str, np.ndarray] = {}
        meta: dict[str, Any] = {}
        for name in data.keys():  # noqa: SIM118 - iterating a TensorDict yields rows
            value = data.get(name)
            if isinstance(value, Tensor) and value.is_nested:
                side = "left" if name in LEFT_PADDED else "right"
                pad = padding.get(name, 0)
                tensors[name] = nested_to_padded(value, side=side, padding=pad, width=widths.get(name))
            elif isinstance(value, Tensor):
                tensors[name] = value
            elif isinstance(value, NonTensorData) and not isinstance(value, NonTensorStack):
                meta[name] = value.data
            else:
                others[name] = object_array(value.tolist())
        return cls(TensorDict(tensors, batch_size=data.batch_size), others, meta)

    def __len__(self) -> int:
        return len(self.batch)

    def __getitem__(self, rows: slice | Sequence[int] | np.ndarray | Tensor) -> DataProto:
        """The rows of a slice, a list of positions or a mask."""
        if not isinstance(rows, slice):
            rows = torch.as_tensor(rows)
        pick = rows.cpu().numpy() if isinstance(rows, Tensor) else rows
        others = {name: column[pick] for name, column in self.non_tensor_batch.items()}
        return DataProto(self.batch[rows], others, dict(self.meta_info))

    def select(self, fields: Sequence[str]) -> DataProto:
        """Only the named fields."""
        others = {name: self.non_tensor_batch[name] for name in fields if name in self.non_tensor_batch}
        tensors = self.batch.select(*(name for name in fields if name not in others))
        return DataProto(tensors, others, dict(self.meta_info))

    def union(self, other: DataProto) -> DataProto:
        """Both sets of fields, row by row; the other's win."""
        if len(self) != len(other):
            raise ValueError(f"cannot unite {len(self)} rows with {len(other)}")
        tensors = TensorDict({**dict(self.batch.items()), **dict(other.batch.items())}, batch_size=[len(self)])
        others = {**self.non_tensor_batch, **other.non_tensor_batch}
        return DataProto(tensors, others, {**self.meta_info, **other.meta_info})

    def reorder(self, order: Sequence[int] | Tensor) -> None:
        """Put row ``order[i]`` at position i, in place."""
        moved = self[torch.as_tensor(order)]
        self.batch, self.non_tensor_batch = moved.batch, moved.non_tensor_batch

    def chunk(self, chunks: int) -> list[DataProto]:
        """``chunks`` parts of equal size, in order."""
        return [self[part] for part in _parts(len(self), chunks)]

    @staticmethod
    def concat(parts: Sequence[DataProto]) -> DataProto:
        """Parts with the same fields one after the other; the first's ``meta_info``."""
        tensors = torch.cat([part.batch for part in parts])
        names = parts[0].non_tensor_batch
        others = {name: np.concatenate([part.non_tensor_batch[name] for part in parts]) for name in names}
        return DataProto(tensors, others, dict(parts[0].meta_info))

    def to_nested(self, fields: Sequence[str], lengths: Tensor) -> TensorDict:
        """Named dense fields as jagged ones, each row's first ``lengths[i]`` elements (last ones for prompts)."""
        sides = {name: "left" if name in LEFT_PADDED else "right" for name in fields}
        nested = {name: padded_to_nested(self.batch[name], lengths, side=side) for name, side in sides.items()}
        return TensorDict(nested, batch_size=[len(self)])


def object_array(values: Sequence[Any] | np.ndarray) -> np.ndarray:
    """Values as a one-dimensional object array, whatever their shape (numpy would unpack equal-length lists)."""
    array = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        array[row] = value
    return array


# ------------------------------------------------------------------------------------------------------ KVBatchMeta


@dataclass
class KVBatchMeta:
    """A batch by name: which trajectories, with their tags, and no values (TransferQueue ``KVBatchMeta``).

    Attributes:
        keys: trajectory or prompt keys, no two alike.
        tags: one dict a key; copied deeply on the way in.
        partition_id: queue partition they live in.
        fields: names of the fields every row has, if known.
        extra_info: facts of the whole batch; copied deeply on the way in.

    Raises:
        ValueError: as many tags as keys are needed, and keys must be distinct.
    """

    keys: list[str]
    tags: list[dict[str, Any]]
    partition_id: str | None = None
    fields: list[str] | None = None
    extra_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.tags):
            raise ValueError(f"keys and tags must have the same length: {len(self.keys)} and {len(self.tags)}")
        if len(set(self.keys)) != len(self.keys):
            raise ValueError("Got duplicated keys.")
        self.keys = list(self.keys)
        self.tags = copy.deepcopy(list(self.tags))
        self.extra_info = copy.deepcopy(self.extra_info)
        self.fields = None if self.fields is None else list(self.fields)

    @property
    def size(self) -> int:
        """Number of keys."""
        return len(self.keys)

    @property
    def real(self) -> int:
        """Number of keys that are no padding."""
        return sum(not tag.get("is_padding", False) for tag in self.tags)

    def __len__(self) -> int:
        return len(self.keys)

    def select_keys(self, keys: Sequence[str]) -> KVBatchMeta:
        """These keys, in this order, with their tags.

        Raises:
            RuntimeError: a key is not in the batch.
            ValueError: a key comes twice.
        """
        place = {key: row for row, key in enumerate(self.keys)}
        unknown = [key for key in keys if key not in place]
        if unknown:
            raise RuntimeError(f"keys not found in the batch: {', '.join(unknown[:3])}")
        return self._rows([place[key] for key in keys])

    def reorder(self, order: Sequence[int]) -> None:
        """Put row ``order[i]`` at position i, in place.

        Raises:
            ValueError: ``order`` is not a permutation of the rows.
        """
        if sorted(order) != list(range(len(self))):
            raise ValueError(f"order is not a permutation of {len(self)} rows")
        self.keys = [self.keys[row] for row in order]
        self.tags = [self.tags[row] for row in order]

    def chunk(self, chunks: int) -> list[KVBatchMeta]:
        """``chunks`` parts in order, the first ones one row longer when it does not divide (TransferQueue)."""
        base, longer = divmod(len(self), chunks)
        parts, start = [], 0
        for part in range(chunks):
            stop = start + base + (part < longer)
            parts.append(self._rows(range(start, stop)))
            start = stop
        return parts

    @classmethod
    def concat(cls, parts: Sequence[KVBatchMeta]) -> KVBatchMeta:
        """Parts of one partition one after the other; extra_info united, later parts winning.

        Raises:
            ValueError: partitions or fields differ, or a key comes twice.
        """
        parts = [part for part in parts if part.size] or list(parts[:1])
        if not parts:
            return cls([], [])
        first, extra = parts[0], {}
        for part in parts:
            if part.partition_id != first.partition_id:
                raise ValueError("cannot concat batches of different partitions")
            if set(part.fields or ()) != set(first.fields or ()):
                raise ValueError("cannot concat batches with different fields")
            extra.update(part.extra_info)
        keys = [key for part in parts for key in part.keys]
        tags = [tag for part in parts for tag in part.tags]
        return cls(keys, tags, first.partition_id, first.fields, extra)

    def _rows(self, rows: Sequence[int]) -> KVBatchMeta:
        keys, tags = [self.keys[row] for row in rows], [self.tags[row] for row in rows]
        return KVBatchMeta(keys, tags, self.partition_id, self.fields, self.extra_info)


def _parts(rows: int, chunks: int) -> list[slice]:
    if rows % chunks:
        raise ValueError(f"{rows} rows do not divide into {chunks} equal parts")
    size = rows // chunks
    return [slice(part * size, (part + 1) * size) for part in range(chunks)]
