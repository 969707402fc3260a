"""Prompt groups as the replay buffer sees them: their status, their outputs, and which are evicted and replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lineage.hooks import UserError
from lineage.trainer.protocol import lengths_of

FILTERED, FAILED = "filtered", "failed"
"""Reasons of an eviction, as the trace spells them."""


class ReplayBufferError(UserError):
    """No batch can be made: every session of the batch failed, or nothing is left that could finish a group."""


class Output(NamedTuple):
    """One output of a group, in the order of its group: ``index`` of the key is its number in the session."""

    session_id: int
    number: int
    key: str
    tag: dict[str, Any]


@dataclass
class StatusSets:
    """Prompt uids by status, each with its tag, in the order they were submitted."""

    pending: dict[str, dict[str, Any]] = field(default_factory=dict)
    running: dict[str, dict[str, Any]] = field(default_factory=dict)
    finished: dict[str, dict[str, Any]] = field(default_factory=dict)
    failure: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, uid: str, tag: dict[str, Any]) -> None:
        """File a prompt under the status its tag gives."""
        sets = {"pending": self.pending, "running": self.running, "finished": self.finished, "failure": self.failure}
        status = tag.get("status")
        if status not in sets:
            raise ReplayBufferError(f"prompt {uid} has status {status!r}: known are {', '.join(sets)}")
        sets[status][uid] = tag

    def remove(self, uid: str) -> None:
        """Forget a prompt."""
        for held in (self.pending, self.running, self.finished, self.failure):
            held.pop(uid, None)

    @property
    def terminal(self) -> dict[str, dict[str, Any]]:
        """Tags of the groups that have ended."""
        return {**self.finished, **self.failure}


@dataclass(frozen=True)
class RefillPolicy:
    """Which terminal groups are evicted, and how many fresh prompts may replace them (verl's refill matrix, sync).

    Attributes:
        filter_groups_metric: evict finished groups whose sessions all have the same value of it: ``reward``, or a key
            of ``reward_extra_info``; each gives credit for two prompts. None keeps them (``algorithm.filter_groups``).
        refill_failed_groups: evict groups that failed without any output, each for one prompt
            (``trainer.v1.sampler.sync_refill_failed_groups``); else they stay, and the batch is smaller.
        max_inflight_gen_batches: with a metric, most batches of prompts pending or running at once.
        max_num_gen_batches: most batches of prompts submitted for one batch; 0 sets no limit (verl V1 has none).
    """

    filter_groups_metric: str | None = None
    refill_failed_groups: bool = False
    max_inflight_gen_batches: int = 1
    max_num_gen_batches: int = 0

    @classmethod
    def of(cls, config: Any) -> RefillPolicy:
        """The policy a whole configuration asks for."""
        groups, sampler = config.algorithm.filter_groups, config.trainer.v1.sampler
        return cls(
            groups.metric if groups.enable else None,
            sampler.sync_refill_failed_groups,
            groups.max_inflight_gen_batches,
            groups.max_num_gen_batches,
        )

    @property
    def evicts(self) -> bool:
        """True when any group may be replaced."""
        return self.filter_groups_metric is not None or self.refill_failed_groups

    def credit(self, reason: str) -> int:
        """Prompts that one eviction allows."""
        return 2 if reason == FILTERED else 1

    def may_submit(self, credit: int, batch_size: int, submitted: int) -> int:
        """Prompts that may be submitted now, of ``credit``.

        Args:
            batch_size: prompts of a batch.
            submitted: prompts submitted for this batch so far.
        """
        if self.filter_groups_metric is not None:
            credit = min(credit, self.max_inflight_gen_batches * batch_size)
        if self.max_num_gen_batches:
            credit = min(credit, self.max_num_gen_batches * batch_size - submitted)
        return max(credit, 0)


class GroupFilter:
    """Finds finished groups whose sessions all have one value of a metric: such a group has no advantage to give.

    A session's value is that of its last output, as for the advantage. A group of one session has nothing to compare
    and stays.

    Args:
        queue: TransferQueue's interface.
        metric: ``reward`` sums ``rm_scores``; any other name is read from ``extra_fields.reward_extra_info``.
    """

    def __init__(self, queue: Any, metric: str) -> None:
        self.queue = queue
        self.metric = metric
        self._uneven: set[str] = set()  # groups that were read before: a finished group does not change

    async def flat(self, groups: Mapping[str, Sequence[Output]], partition_id: str) -> list[str]:
        """Those of the finished groups whose sessions all have one value.

        Args:
            groups: outputs by uid.

        Raises:
            ReplayBufferError: an output has no such metric.
        """
        self._uneven &= groups.keys()
        finals = {
            uid: {output.session_id: output.key for output in sorted(outputs)}
            for uid, outputs in groups.items()
            if uid not in self._uneven
        }
        keys = [key for sessions in finals.values() for key in sessions.values()]
        values = dict(zip(keys, await self._values(keys, partition_id), strict=True)) if keys else {}
        flat = []
        for uid, sessions in finals.items():
            if len(sessions) > 1 and len({values[key] for key in sessions.values()}) == 1:
                flat.append(uid)
            else:
                self._uneven.add(uid)
        return flat

    async def _values(self, keys: list[str], partition_id: str) -> list[float]:
        name = "rm_scores" if self.metric == "reward" else "extra_fields"
        data = await self.queue.async_kv_batch_get(keys=keys, partition_id=partition_id, select_fields=[name])
        if name not in data.keys():  # noqa: SIM118
            raise ReplayBufferError(
                f"algorithm.filter_groups.metric={self.metric}: the trajectories have no {name} when they are sampled; "
                "score them inside the agent loop"
            )
        if self.metric == "reward":
            scores = data[name]
            rows = scores.values().split(lengths_of(scores).tolist())
            return [float(row.sum()) for row in rows]
        return [self._of(key, extra) for key, extra in zip(keys, data[name].tolist(), strict=True)]

    def _of(self, key: str, extra_fields: Mapping[str, Any]) -> float:
        info = extra_fields.get("reward_extra_info") or {}
        try:
            return float(info[self.metric])
        except (KeyError, TypeError, ValueError):
            raise ReplayBufferError(
                f"algorithm.filter_groups.metric={self.metric}: the scorer gave {key} no such number; "
                f"it gave {', '.join(map(str, info)) or 'nothing'}; take one of them, or reward"
            ) from None
