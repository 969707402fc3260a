"""TransferQueue's key-value interface, recorded: every put, get, tag and clear, with the stage open at the call.

TransferQueue drops what it does not have without a word: a key that is not there, a field that one row lacks. The proxy
returns what the queue returned and records what was asked beside what was got.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lineage.batch import items_of
from lineage.context import Resident
from lineage.elements import LENGTH_TAGS, tag_columns
from lineage.keys import parse_key
from lineage.scopes import current_stage
from lineage.stage import NullStage, Stage
from lineage.vocabulary import STATUSES


class TracedQueue:
    """Proxy of a queue. What it does not know it hands on.

    Args:
        queue: any object with ``kv_put kv_batch_put kv_batch_get kv_batch_get_by_meta kv_list kv_clear`` and their
            ``async_`` twins. If it has ``global_indexes(keys, partition_id)`` and ``resident()``, rows carry the slots
            of their keys and what is left after a clear.
    """

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._is_prompt: dict[str, bool] = {}  # of the keys that have tags

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    # -- put ------------------------------------------------------------------------------------------------------

    def kv_put(
        self, key: str, partition_id: str, fields: Any = None, tag: Mapping[str, Any] | None = None, **options: Any
    ) -> Any:
        """Record one row's fields and tag, then put them."""
        meta = self._queue.kv_put(key, partition_id, fields, tag, **options)
        self._put([key], partition_id, fields, None if tag is None else [tag])
        return meta

    async def async_kv_put(
        self, key: str, partition_id: str, fields: Any = None, tag: Mapping[str, Any] | None = None, **options: Any
    ) -> Any:
        """Async twin of :meth:`kv_put`."""
        meta = await self._queue.async_kv_put(key, partition_id, fields, tag, **options)
        self._put([key], partition_id, fields, None if tag is None else [tag])
        return meta

    def kv_batch_put(
        self,
        keys: Sequence[str],
        partition_id: str,
        fields: Any = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> Any:
        """Put fields and tags of many keys, and record them."""
        meta = self._queue.kv_batch_put(keys, partition_id, fields, tags, **options)
        self._put(keys, partition_id, fields, tags)
        return meta

    async def async_kv_batch_put(
        self,
        keys: Sequence[str],
        partition_id: str,
        fields: Any = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> Any:
        """Async twin of :meth:`kv_batch_put`."""
        meta = await self._queue.async_kv_batch_put(keys, partition_id, fields, tags, **options)
        self._put(keys, partition_id, fields, tags)
        return meta

    # -- get ------------------------------------------------------------------------------------------------------

    def kv_batch_get(self, keys: Any, partition_id: str, select_fields: Any = None, **options: Any) -> Any:
        """Get fields of many keys, and record what came beside what was asked."""
        batch = self._queue.kv_batch_get(keys, partition_id, select_fields, **options)
        self._got(keys, partition_id, select_fields, batch)
        return batch

    async def async_kv_batch_get(self, keys: Any, partition_id: str, select_fields: Any = None, **options: Any) -> Any:
        """Async twin of :meth:`kv_batch_get`."""
        batch = await self._queue.async_kv_batch_get(keys, partition_id, select_fields, **options)
        self._got(keys, partition_id, select_fields, batch)
        return batch

    def kv_batch_get_by_meta(self, meta: Any, select_fields: Any = None, **options: Any) -> Any:
        """Get the rows a batch descriptor names."""
        batch = self._queue.kv_batch_get_by_meta(meta, select_fields, **options)
        self._got(meta.keys, meta.partition_id, select_fields, batch)
        return batch

    async def async_kv_batch_get_by_meta(self, meta: Any, select_fields: Any = None, **options: Any) -> Any:
        """Async twin of :meth:`kv_batch_get_by_meta`."""
        batch = await self._queue.async_kv_batch_get_by_meta(meta, select_fields, **options)
        self._got(meta.keys, meta.partition_id, select_fields, batch)
        return batch

    # -- clear ----------------------------------------------------------------------------------------------------

    def kv_clear(self, keys: Any, partition_id: str, **options: Any) -> Any:
        """Clear keys, and record which, and what is left."""
        done = self._queue.kv_clear(keys, partition_id, **options)
        self._cleared(keys, partition_id)
        return done

    async def async_kv_clear(self, keys: Any, partition_id: str, **options: Any) -> Any:
        """Async twin of :meth:`kv_clear`."""
        done = await self._queue.async_kv_clear(keys, partition_id, **options)
        self._cleared(keys, partition_id)
        return done

    def forget_all(self) -> list[str]:
        """Forget what was told of keys, where another process clears them; the keys."""
        keys = list(self._is_prompt)
        self._is_prompt.clear()
        return keys

    # -- rows -----------------------------------------------------------------------------------------------------

    def _put(self, keys: Sequence[str], partition: str, fields: Any, tags: Sequence[Mapping[str, Any]] | None) -> None:
        stage = current_stage()
        if isinstance(stage, NullStage):
            return
        elements = stage.recorder.elements
        if tags is not None:
            self._note(keys, tags)
            elements.note(keys, tags)
        entity = self._entity(keys)
        slots = self._slots(keys, partition)
        if slots is not None:
            elements.note_slots(keys, slots)
        if tags is not None:
            self._tagged(stage, keys, partition, entity, tags)
        if fields is not None:
            stage.produce(fields, keys=keys, entity=entity, partition=partition)

    def _tagged(
        self,
        stage: Stage,
        keys: Sequence[str],
        partition: str,
        entity: str,
        tags: Sequence[Mapping[str, Any]],
    ) -> None:
        columns = tag_columns(tags)
        stage.tag(keys, entity=entity, partition=partition, columns=columns)
        numbers = {
            name: [int(one[name]) for one in tags]
            for name in LENGTH_TAGS
            if all(one.get(name) is not None for one in tags)
        }
        if numbers:
            stage.record("tag", numbers, keys=keys, entity=entity, partition=partition)

    def _got(self, keys: Any, partition: str, select_fields: Any, batch: Any) -> None:
        stage = current_stage()
        if isinstance(stage, NullStage):
            return
        asked = _listed(keys)
        items = dict(items_of(batch))
        got = batch.batch_size[0] if items else 0
        known = self._known(asked, partition) if got < len(asked) else set(asked)
        missing = [key for key in asked if key not in known]
        found = [key for key in asked if key in known]
        context: dict[str, Any] = {"partition": partition, "asked_n": len(asked), "missing": missing}
        if items:
            stage.consume(batch, keys=found, entity=self._entity(found), **context)
        for field in _listed(select_fields or ()):
            if field not in items:
                stage.event("consume", field, entity=self._entity(asked), container="TensorDict", **context)

    def _cleared(self, keys: Any, partition: str) -> None:
        stage = current_stage()
        names = _listed(keys)
        if isinstance(stage, NullStage) or not names:
            return
        resident = getattr(self._queue, "resident", None)
        left = Resident(*resident()) if resident is not None else None
        by_entity: dict[str, list[str]] = {}
        for key in names:
            by_entity.setdefault(self._entity([key]), []).append(key)
        for entity, some in by_entity.items():
            stage.clear(some, entity=entity, partition=partition, resident=left)
        stage.recorder.forget(names)
        for key in names:
            self._is_prompt.pop(key, None)

    def _note(self, keys: Sequence[str], tags: Sequence[Mapping[str, Any]]) -> None:
        for key, tag in zip(keys, tags, strict=True):
            if "is_prompt" in tag:
                self._is_prompt[key] = bool(tag["is_prompt"])
            elif key not in self._is_prompt:  # another process said what it is, and this one only says how it stands
                self._is_prompt[key] = tag.get("status") in STATUSES

    def _entity(self, keys: Sequence[str]) -> str:
        """What the keys of one call name: a prompt where it was tagged so, or has no tags and is a bare uid."""
        if not keys:
            return "trajectory"
        tagged = self._is_prompt.get(keys[0])
        prompt = tagged if tagged is not None else parse_key(keys[0]) is None
        return "prompt" if prompt else "trajectory"

    def _slots(self, keys: Sequence[str], partition: str) -> list[int] | None:
        indexes = getattr(self._queue, "global_indexes", None)
        return None if indexes is None else indexes(list(keys), partition)

    def _known(self, keys: Sequence[str], partition: str) -> set[str]:
        held = self._queue.kv_list(partition).get(partition, {})
        return {key for key in keys if key in held}


def _listed(keys: Any) -> list[str]:
    return [keys] if isinstance(keys, str) else list(keys)
