"""Faults of identity: keys, groups, the order of rows."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict

from lineage.trainer.faults.registry import Seams, fault
from lineage.trainer.faults.seams import TRAJECTORY_FIELDS
from lineage.trainer.protocol import KVBatchMeta


@fault("KEY001", "rollout")
def uid_of_the_first_group() -> Seams:
    """The uid column is filled from the first row of the batch: groups are written with another group's uid."""
    first: list[str] = []

    def write(original: Any, uid: str, *rest: Any) -> TensorDict:
        first.append(uid)
        return original(first[0], *rest)

    return {TRAJECTORY_FIELDS: write}


@fault("KEY002", "sample")
def lost_session() -> Seams:
    """The replay buffer forgets one session of a group: the step trains on what is left and says nothing."""

    async def materialize(original: Any, buffer: Any, uids: list[str], *rest: Any) -> KVBatchMeta:
        buffer._outputs[uids[-1]].pop()
        return await original(buffer, uids, *rest)

    return {"lineage.trainer.replay_buffer.ReplayBuffer._materialize_batch": materialize}


@fault("KEY003", "balance")
def tags_left_behind() -> Seams:
    """The balance reorders the keys of the batch and leaves their tags where they were."""

    def reorder(original: Any, batch: KVBatchMeta, order: list[int]) -> None:
        tags = list(batch.tags)
        original(batch, order)
        batch.tags = tags

    return {"lineage.trainer.protocol.KVBatchMeta.reorder": reorder}
