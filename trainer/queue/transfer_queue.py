"""The real TransferQueue as the store: one process starts it in the Ray cluster, the others attach to it.

The interface and the layouts are those of ``LocalTransferQueue``, so the trainer does not know which one it has;
``tests/trainer/queue`` holds both to the same laws. Imported where ``mode=ray`` is asked for, and nowhere else: it
needs the ``ray`` extra.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from omegaconf import OmegaConf
from tensordict import TensorDict

from lineage.hooks import MissingExtraError, UserError
from lineage.trainer.protocol import KVBatchMeta
from lineage.trainer.queue.columns import relaid
from lineage.trainer.queue.local import DataParser

try:
    import ray
    import transfer_queue as tq
    from transfer_queue import client as tq_client
    from transfer_queue import interface as tq_interface
except ImportError as error:
    raise MissingExtraError("mode=ray", "ray", error.name) from error

T = TypeVar("T")
Tags = dict[str, dict[str, dict[str, Any]]]

CONTROLLER = ("TransferQueueController", "transfer_queue")  # name and namespace
_WATCH_S = 2.0  # between two looks at whether the actors live, while a call waits
_FREE_S = 10.0  # Ray counts the CPUs of an actor that just ended for about a second

# A put or get would set torch's thread count to the machine's and back to what it was when the package was imported,
# for the whole process and whatever the trainer had set.
tq_client.limit_pytorch_auto_parallel_threads = lambda *_, **__: contextlib.nullcontext()


class QueueStartError(UserError):
    """TransferQueue cannot be started or found: one line that says why, and what to change."""


class QueueLostError(UserError):
    """An actor of TransferQueue ended while the run went on; what it held is lost."""


class TransferQueue:
    """Keys, tags and values by partition, in TransferQueue's actors.

    Every ``kv_*`` method has its ``async_`` twin of the same signature, for any event loop. The plain ones wait, and
    hold up the loop they are called in. Pickled into another process of the cluster it is attached there on first use.
    """

    def __init__(self) -> None:
        self._owner = False
        self._actors: dict[str, Any] = {}

    def __reduce__(self) -> tuple[type[TransferQueue], tuple[()]]:
        return TransferQueue, ()

    # ------------------------------------------------------------------------------------------------------ life

    def init(self, conf: Mapping[str, Any] | None = None) -> Any:
        """Start the controller and the storage units, and own them: ``close`` ends them.

        Args:
            conf: TransferQueue's own configuration, over its defaults; the number of storage units is
                ``backend.SimpleStorage.num_data_storage_units``.

        Returns:
            The whole configuration.

        Raises:
            QueueStartError: no Ray, too few free CPUs (TransferQueue would wait for them without an end), or one runs
                in the cluster already.
        """
        if not ray.is_initialized():
            raise QueueStartError("TransferQueue needs a Ray cluster: call ray.init() first")
        if _actor(*CONTROLLER) is not None:
            raise QueueStartError("a TransferQueue runs in this Ray cluster already: attach() to it, or close it first")
        _need_cpus(1 + _units(conf))
        self._owner = True
        whole = tq.init(None if conf is None else OmegaConf.create(dict(conf), flags={"allow_objects": True}))
        self._watch()
        return whole

    def attach(self) -> None:
        """Connect this process to the TransferQueue of its cluster; the first call of any verb does the same.

        Raises:
            QueueStartError: there is none.
        """
        if not ray.is_initialized() or _actor(*CONTROLLER) is None:
            raise QueueStartError("no TransferQueue in this Ray cluster: the first process starts it by init()")
        tq.init()
        self._watch()

    def close(self) -> None:
        """End the actors where they were started, elsewhere only this process's connection.

        TransferQueue's own ``close`` ends the controller for everyone, whoever calls it. Call this first in the
        processes that attached, then in the one that started it, and shut Ray down last.
        """
        if self._owner:
            tq.close()
            self._owner, self._actors = False, {}
        elif tq_interface._TQ_CLIENT is not None and not tq_interface._TQ_STORAGE:  # this process started none
            tq_interface._TQ_CLIENT.close()
            tq_interface._TQ_CLIENT = tq_interface._TQ_CONTROLLER = None

    def get_client(self) -> Any:
        """TransferQueue's low-level client, of rows by slot."""
        return tq.get_client()

    # -------------------------------------------------------------------------------------------------------- put

    def kv_put(
        self,
        key: str,
        partition_id: str,
        fields: TensorDict | dict[str, Any] | None = None,
        tag: dict[str, Any] | None = None,
        data_parser: DataParser | None = None,
    ) -> KVBatchMeta:
        """See ``LocalTransferQueue.kv_put``."""
        return self._wait(self.async_kv_put, key, partition_id, fields, tag, data_parser)

    async def async_kv_put(
        self,
        key: str,
        partition_id: str,
        fields: TensorDict | dict[str, Any] | None = None,
        tag: dict[str, Any] | None = None,
        data_parser: DataParser | None = None,
    ) -> KVBatchMeta:
        """See :meth:`kv_put`."""
        return _meta(await self._watched(tq.async_kv_put, key, partition_id, fields, tag, data_parser))

    def kv_batch_put(
        self,
        keys: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
        data_parser: DataParser | None = None,
    ) -> KVBatchMeta:
        """See ``LocalTransferQueue.kv_batch_put``."""
        return self._wait(self.async_kv_batch_put, keys, partition_id, fields, tags, data_parser)

    async def async_kv_batch_put(
        self,
        keys: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
        data_parser: DataParser | None = None,
    ) -> KVBatchMeta:
        """See :meth:`kv_batch_put`."""
        return _meta(await self._watched(tq.async_kv_batch_put, keys, partition_id, fields, tags, data_parser))

    # -------------------------------------------------------------------------------------------------------- get

    def kv_batch_get(
        self, keys: list[str] | str, partition_id: str, select_fields: list[str] | str | None = None
    ) -> TensorDict:
        """See ``LocalTransferQueue.kv_batch_get``."""
        return self._wait(self.async_kv_batch_get, keys, partition_id, select_fields)

    async def async_kv_batch_get(
        self, keys: list[str] | str, partition_id: str, select_fields: list[str] | str | None = None
    ) -> TensorDict:
        """See :meth:`kv_batch_get`."""
        data = await self._watched(tq.async_kv_batch_get, keys, partition_id, select_fields)
        return relaid(data, select_fields)

    def kv_batch_get_by_meta(self, meta: KVBatchMeta, select_fields: list[str] | str | None = None) -> TensorDict:
        """See ``LocalTransferQueue.kv_batch_get_by_meta``."""
        return self._wait(self.async_kv_batch_get_by_meta, meta, select_fields)

    async def async_kv_batch_get_by_meta(
        self, meta: KVBatchMeta, select_fields: list[str] | str | None = None
    ) -> TensorDict:
        """See :meth:`kv_batch_get_by_meta`."""
        data = await self._watched(tq.async_kv_batch_get_by_meta, meta, select_fields)
        return relaid(data, meta.fields if select_fields is None else select_fields)

    def kv_list(self, partition_id: str | None = None) -> Tags:
        """See ``LocalTransferQueue.kv_list``."""
        return self._wait(self.async_kv_list, partition_id)

    async def async_kv_list(self, partition_id: str | None = None) -> Tags:
        """See :meth:`kv_list`."""
        return await self._watched(tq.async_kv_list, partition_id)

    def kv_clear(self, keys: list[str] | str, partition_id: str) -> None:
        """See ``LocalTransferQueue.kv_clear``."""
        self._wait(self.async_kv_clear, keys, partition_id)

    async def async_kv_clear(self, keys: list[str] | str, partition_id: str) -> None:
        """See :meth:`kv_clear`."""
        await self._watched(tq.async_kv_clear, keys, partition_id)

    # ---------------------------------------------------------------------------------------- what a trace records

    def global_indexes(self, keys: Sequence[str], partition_id: str) -> list[int]:
        """Slot of each key, -1 for one the partition does not hold."""
        if not keys:
            return []
        slots = self._wait(self._slots, list(keys), partition_id)
        if len(slots) == len(keys):
            return slots
        held = self.kv_list(partition_id).get(partition_id, {})
        known = [key for key in keys if key in held]
        if len(known) != len(slots):  # others put and clear meanwhile
            return [-1] * len(keys)
        found = dict(zip(known, slots, strict=True))
        return [found.get(key, -1) for key in keys]

    def resident(self) -> tuple[int, int, int | None]:
        """What the store still holds: prompt keys, trajectory keys, and None for the bytes, which nobody counts."""
        tags = [tag for partition in self.kv_list().values() for tag in partition.values()]
        prompts = sum(bool(tag.get("is_prompt")) for tag in tags)
        return prompts, len(tags) - prompts, None

    # ----------------------------------------------------------------------------------------------------- inside

    async def _slots(self, keys: list[str], partition_id: str) -> list[int]:
        meta = await self._watched(self._client().async_kv_retrieve_meta, keys, partition_id)
        return list(meta.global_indexes)

    def _watch(self) -> None:
        """Note the actors to watch, those that can be found from here: storage units are named in their job only."""
        units = len(tq.get_client().storage_manager.get_zmq_server_info())
        names = [CONTROLLER, *((f"TransferQueueStorageUnit#{unit}", None) for unit in range(units))]
        self._actors = {name: actor for name, space in names if (actor := _actor(name, space)) is not None}

    def _client(self) -> Any:
        if tq_interface._TQ_CLIENT is None or not self._actors:
            self.attach()
        return tq.get_client()

    def _wait(self, call: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T:
        """The result of a call, made in the loop of the client's own thread."""
        return self._client()._run_coroutine(call(*arguments))

    async def _watched(self, call: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T:
        """The result of a call; an error when one of the queue's actors is gone, which would never answer.

        TransferQueue itself waits ten minutes for a storage unit, and for the controller without an end.
        """
        self._client()
        task = asyncio.ensure_future(call(*arguments))
        try:
            while not (await asyncio.wait({task}, timeout=_WATCH_S))[0]:
                gone = [name for name, actor in self._actors.items() if await _ended(actor)]
                if gone:
                    lost = f"TransferQueue lost {', '.join(gone)} (its process ended): start the run again"
                    raise QueueLostError(lost)
        finally:  # whoever no longer waits, a cancelled session above all, must not write on
            if not task.done():
                task.cancel()
        return task.result()


def _meta(meta: Any) -> KVBatchMeta:
    """TransferQueue's batch as the trainer's."""
    return KVBatchMeta(meta.keys, meta.tags, meta.partition_id, meta.fields, meta.extra_info)


def _actor(name: str, namespace: str | None) -> Any:
    try:
        return ray.get_actor(name, namespace)
    except ValueError:
        return None


async def _ended(actor: Any) -> bool:
    """Whether an actor's process is known to have ended; a busy one has not."""
    try:
        await asyncio.wait_for(asyncio.wrap_future(actor.__ray_ready__.remote().future()), timeout=1)
    except ray.exceptions.RayActorError:
        return True
    except TimeoutError:
        return False
    return False


def _units(conf: Mapping[str, Any] | None) -> int:
    found = OmegaConf.select(OmegaConf.create(dict(conf or {})), "backend.SimpleStorage.num_data_storage_units")
    return 2 if found is None else int(found)  # 2 is TransferQueue's default


def _need_cpus(cpus: int) -> None:
    """Wait until this many CPUs are free; the actors of a queue that just ended give theirs back late."""
    total, until = ray.cluster_resources().get("CPU", 0), time.monotonic() + _FREE_S
    while (free := ray.available_resources().get("CPU", 0)) < cpus:
        if total < cpus or time.monotonic() > until:
            raise QueueStartError(
                f"TransferQueue needs {cpus} free CPUs of Ray (one for the controller, one a storage unit), and "
                f"{free:g} of {total:g} are: raise ray.init(num_cpus=...), or lower "
                "backend.SimpleStorage.num_data_storage_units"
            )
        time.sleep(0.1)
