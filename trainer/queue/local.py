"""An in-process store with the interface and the measured semantics of TransferQueue 0.1.11.

What the real one does silently, this one does too, because a trace must show it: a get of unknown keys returns a
shorter batch, a field that one row lacks is left out for every row, a put merges tags, and a write to a cleared key
creates it again. ``tests/trainer/queue`` states each of these, of both.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from lineage.trainer.protocol import KVBatchMeta, lengths_of, tokens_last
from lineage.trainer.queue.batch_meta import BatchMeta
from lineage.trainer.queue.columns import Offsets, column

logger = logging.getLogger(__name__)

DataParser = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass
class _Row:
    """One key's slot, tag and values."""

    slot: int
    tag: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


class LocalTransferQueue:
    """Keys, tags and values by partition, in this process.

    Every ``kv_*`` method has its ``async_`` twin of the same signature. Nothing here waits, so an asynchronous call
    never yields to the loop.
    """

    def __init__(self) -> None:
        self._partitions: dict[str, dict[str, _Row]] = {}
        self._keys: dict[int, tuple[str, str]] = {}
        self._free: list[int] = []
        self._fresh = itertools.count()

    # ------------------------------------------------------------------------------------------------------ life

    def init(self, conf: Any = None) -> Any:
        """Start empty. ``conf`` is TransferQueue's, and has no meaning here; it is returned as given."""
        self.__init__()  # type: ignore[misc]
        return conf

    def close(self) -> None:
        """Forget everything."""
        self.__init__()  # type: ignore[misc]

    def get_client(self) -> LocalTransferQueue:
        """The low-level client: in one process, the store itself."""
        return self

    # -------------------------------------------------------------------------------------------------------- put

    def kv_put(
        self,
        key: str,
        partition_id: str,
        fields: TensorDict | dict[str, Any] | None = None,
        tag: dict[str, Any] | None = None,
        data_parser: DataParser | None = None,
    ) -> KVBatchMeta:
        """Write fields of one key, merge its tag, or both.

        Args:
            fields: a dict of one row (tensors without the batch dimension), or a TensorDict of batch size 1.

        Raises:
            ValueError: neither fields nor tag; a nested tensor in a dict (use ``kv_batch_put``).
            TypeError: a NonTensorData field (use NonTensorStack).
        """
        if fields is None and tag is None:
            raise ValueError("Please provide at least one parameter of fields or tag.")
        if isinstance(fields, Mapping) and not isinstance(fields, TensorDict):
            fields = _one_row(fields)
        elif fields is not None and not isinstance(fields, TensorDict):
            raise ValueError("`fields` can only be dict or TensorDict")
        return self.kv_batch_put([key], partition_id, fields, None if tag is None else [tag], data_parser)

    def kv_batch_put(
        self,
        keys: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
        data_parser: DataParser | None = None,
    ) -> KVBatchMeta:
        """Write fields of many keys, merge their tags, or both; unknown keys are created.

        Args:
            keys: one a row.
            fields: values, batch size ``len(keys)``; jagged tensors, dense ones, NonTensorStack.
            tags: one dict a key, merged into the stored tag.
            data_parser: called on the fields as a dict of columns before they are stored, to replace them in place;
                returns that dict.

        Returns:
            Keys with their merged tags; ``fields`` is what every row has now, ``extra_info`` is empty.

        Raises:
            ValueError: neither fields nor tags; sizes that do not match; a key twice, *after* the data were stored.
            TypeError: a NonTensorData field.
            RuntimeError: ``data_parser`` returned something else.
        """
        if fields is None and tags is None:
            raise ValueError("Please provide at least one parameter of `fields` or `tags`.")
        if fields is not None and fields.batch_size[0] != len(keys):
            raise ValueError(
                f"`keys` with length {len(keys)} does not match the `fields` TensorDict with "
                f"batch_size {fields.batch_size[0]}"
            )
        rows = [self._row(key, partition_id) for key in keys]
        if tags is not None:
            if len(tags) != len(keys):
                raise ValueError(f"keys with length {len(keys)} does not match length of tags {len(tags)}")
            for row, tag in zip(rows, tags, strict=True):
                row.tag.update(copy.deepcopy(tag))
        if fields is not None:
            _store(rows, fields, data_parser)
        return KVBatchMeta(list(keys), [row.tag for row in rows], partition_id, _common_fields(rows))

    # -------------------------------------------------------------------------------------------------------- get

    def kv_batch_get(
        self, keys: list[str] | str, partition_id: str, select_fields: list[str] | str | None = None
    ) -> TensorDict:
        """A copy of the named fields of the keys that exist, rows in the order of the keys.

        Rows of at least one dimension come back as a jagged tensor, 0-dimensional ones stacked, anything else as a
        NonTensorStack. Unknown keys and fields that a row lacks are left out without an error.

        Raises:
            ValueError: no key is known; no field is common to all keys and none was asked for by name.
        """
        meta = self._retrieve(keys, partition_id)
        if meta.size == 0:
            raise ValueError("keys or partition were not found!")
        if select_fields is not None:
            meta = meta.select_fields([select_fields] if isinstance(select_fields, str) else select_fields)
        elif not meta.is_ready:
            raise ValueError("Some fields are not ready in all the requested keys!")
        return self._get(meta)

    def kv_batch_get_by_meta(self, meta: KVBatchMeta, select_fields: list[str] | str | None = None) -> TensorDict:
        """``kv_batch_get`` of a batch's keys; its ``fields`` unless others are named.

        Raises:
            ValueError: no partition in ``meta``, or a named field that ``meta.fields`` does not list.
        """
        if meta.partition_id is None:
            raise ValueError("Must provide partition_id in the input KVBatchMeta.")
        if select_fields is None:
            return self.kv_batch_get(meta.keys, meta.partition_id, meta.fields)
        names = [select_fields] if isinstance(select_fields, str) else select_fields
        if meta.fields is None or any(name not in meta.fields for name in names):
            raise ValueError(
                "Some fields assigned in select_fields not found in the metadata. "
                f"Assigned: {names}; Fields in KVBatchMeta: {meta.fields}."
            )
        return self.kv_batch_get(meta.keys, meta.partition_id, names)

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
        """``{partition: {key: tag}}`` of one or all partitions, emptied ones included; the tags are copies."""
        names = list(self._partitions) if partition_id is None else [partition_id]
        return {
            name: {key: copy.deepcopy(row.tag) for key, row in self._partitions[name].items()}
            for name in names
            if name in self._partitions
        }

    def kv_clear(self, keys: list[str] | str, partition_id: str) -> None:
        """Forget keys, tags and values; unknown ones are ignored. The slots are given out again later."""
        rows = self._partitions.get(partition_id, {})
        for key in [keys] if isinstance(keys, str) else keys:
            row = rows.pop(key, None)
            if row is not None:
                del self._keys[row.slot]
                self._free.append(row.slot)

    # ----------------------------------------------------------------------------------------- asynchronous twins

    async def async_kv_put(
        self,
        key: str,
        partition_id: str,
        fields: TensorDict | dict[str, Any] | None = None,
        tag: dict[str, Any] | None = None,
        data_parser: DataParser | None = None,
    ) -> KVBatchMeta:
        """See :meth:`kv_put`."""
        return self.kv_put(key, partition_id, fields, tag, data_parser)

    async def async_kv_batch_put(
        self,
        keys: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
        data_parser: DataParser | None = None,
    ) -> KVBatchMeta:
        """See :meth:`kv_batch_put`."""
        return self.kv_batch_put(keys, partition_id, fields, tags, data_parser)

    async def async_kv_batch_get(
        self, keys: list[str] | str, partition_id: str, select_fields: list[str] | str | None = None
    ) -> TensorDict:
        """See :meth:`kv_batch_get`."""
        return self.kv_batch_get(keys, partition_id, select_fields)

    async def async_kv_batch_get_by_meta(
        self, meta: KVBatchMeta, select_fields: list[str] | str | None = None
    ) -> TensorDict:
        """See :meth:`kv_batch_get_by_meta`."""
        return self.kv_batch_get_by_meta(meta, select_fields)

    async def async_kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
        """See :meth:`kv_list`."""
        return self.kv_list(partition_id)

    async def async_kv_clear(self, keys: list[str] | str, partition_id: str) -> None:
        """See :meth:`kv_clear`."""
        self.kv_clear(keys, partition_id)

    # ------------------------------------------------------------------------------ low-level client: rows by slot

    async def async_kv_retrieve_meta(self, keys: list[str] | str, partition_id: str, create: bool = False) -> BatchMeta:
        """Slots, tags and common fields of the keys that exist; with ``create``, of all of them."""
        if create:
            for key in [keys] if isinstance(keys, str) else keys:
                self._row(key, partition_id)
        return self._retrieve(keys, partition_id)

    async def async_kv_retrieve_keys(self, global_indexes: list[int], partition_id: str) -> list[str | None]:
        """Key of each slot, None where the slot holds nothing of this partition."""
        held = [self._keys.get(slot, (None, None)) for slot in global_indexes]
        return [key if partition == partition_id else None for partition, key in held]

    async def async_get_data(self, metadata: BatchMeta) -> TensorDict:
        """Values of the batch's fields, rows in the order of its slots."""
        return self._get(metadata)

    async def async_put(self, data: TensorDict, metadata: BatchMeta) -> BatchMeta:
        """Write fields by slot; returns the batch with the fields every row has now."""
        rows = self._rows(metadata)
        if len(rows) != data.batch_size[0]:
            raise ValueError(f"{len(rows)} slots do not match a batch of {data.batch_size[0]}")
        _store(rows, data, None)
        return self._meta(rows, metadata.partition_ids)

    def global_indexes(self, keys: Sequence[str], partition_id: str) -> list[int]:
        """Slot of each key, -1 for one the partition does not hold."""
        rows = self._partitions.get(partition_id, {})
        return [rows[key].slot if key in rows else -1 for key in keys]

    def resident(self) -> tuple[int, int, int]:
        """What the store still holds: prompt keys, trajectory keys, bytes of tensors and strings."""
        rows = [row for partition in self._partitions.values() for row in partition.values()]
        prompts = sum(bool(row.tag.get("is_prompt")) for row in rows)
        return prompts, len(rows) - prompts, sum(_nbytes(value) for row in rows for value in row.values.values())

    # ----------------------------------------------------------------------------------------------------- inside

    def _row(self, key: str, partition_id: str) -> _Row:
        """The key's row, created if there is none: a cleared key comes back, empty."""
        rows = self._partitions.setdefault(partition_id, {})
        row = rows.get(key)
        if row is None:
            row = rows[key] = _Row(self._free.pop(0) if self._free else next(self._fresh))
            self._keys[row.slot] = (partition_id, key)
        return row

    def _retrieve(self, keys: list[str] | str, partition_id: str) -> BatchMeta:
        keys = [keys] if isinstance(keys, str) else keys
        rows = self._partitions.get(partition_id, {})
        found = [rows[key] for key in keys if key in rows]
        if len(found) < len(keys):
            missing = [key for key in keys if key not in rows]
            logger.warning("keys %s were not found in partition %s and are left out", missing[:3], partition_id)
        return self._meta(found, (partition_id,) * len(found))

    def _meta(self, rows: list[_Row], partition_ids: tuple[str, ...]) -> BatchMeta:
        slots = tuple(row.slot for row in rows)
        return BatchMeta(slots, partition_ids, tuple(_common_fields(rows)), tuple(dict(row.tag) for row in rows))

    def _rows(self, meta: BatchMeta) -> list[_Row]:
        held = [self._keys.get(slot) for slot in meta.global_indexes]
        return [self._partitions[place[0]][place[1]] for place in held if place is not None]

    def _get(self, meta: BatchMeta) -> TensorDict:
        rows = self._rows(meta)
        if not meta.field_names or not rows:
            return TensorDict({}, batch_size=[0])
        shared: Offsets = {}
        columns = {name: column([row.values[name] for row in rows], shared) for name in meta.field_names}
        return TensorDict(columns, batch_size=[len(rows)])


def _one_row(fields: Mapping[str, Any]) -> TensorDict:
    """A dict of one row's values as a TensorDict of batch size 1."""
    columns: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Tensor):
            if value.is_nested:
                raise ValueError("Please use (async)kv_batch_put for batch operation")
            columns[name] = value.unsqueeze(0)
        elif isinstance(value, NonTensorData) and not isinstance(value, NonTensorStack):
            raise TypeError(f"field {name!r}: NonTensorData cannot be stored, use NonTensorStack")
        else:
            columns[name] = NonTensorStack(value)
    return TensorDict(columns, batch_size=[1])


def _store(rows: list[_Row], fields: TensorDict, data_parser: DataParser | None) -> None:
    """Write every column into its rows; each column is copied once, the rows are views of that copy."""
    columns = {name: _rows_of(name, fields.get(name)) for name in fields.keys()}  # noqa: SIM118
    if data_parser is not None:
        columns = data_parser(columns)
        if not isinstance(columns, dict):
            raise RuntimeError(f"data_parser must return a dict, got {type(columns).__name__}")
    for name, values in columns.items():
        for row, value in zip(rows, values, strict=True):
            row.values[name] = value


def _rows_of(name: str, value: Any) -> list[Any]:
    """A column's rows: tensors detached from the caller's memory and graph, or plain objects."""
    if isinstance(value, Tensor):
        if not value.is_nested:
            return list(value.detach().clone().unbind(0))
        lengths = lengths_of(value).tolist()
        return list(value.values().detach().clone().split(lengths, dim=-1 if tokens_last(value) else 0))
    if isinstance(value, NonTensorStack):
        return copy.deepcopy(value.tolist())
    raise TypeError(f"field {name!r}: {type(value).__name__} cannot be stored, use a tensor or NonTensorStack")


def _common_fields(rows: list[_Row]) -> list[str]:
    """Fields that every row has, in the order the first row got them."""
    if not rows:
        return []
    return [name for name in rows[0].values if all(name in row.values for row in rows)]


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return len(value.encode()) if isinstance(value, str) else 0
