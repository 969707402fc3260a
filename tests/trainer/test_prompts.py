"""The stream of prompts and their uids."""

from __future__ import annotations

import uuid

from lineage.trainer.prompts import PromptStream, prompt_uid
from lineage.trainer.protocol import object_array


class TwoBatches:
    """A loader of two batches that begins anew on each iteration."""

    def __iter__(self):
        return iter([{"index": object_array([0, 1])}, {"index": object_array([2, 0])}])

    def state_dict(self):
        return {"place": 1}


def uids(stream, batches):
    """Uids of the next batches."""
    return [uid for _ in range(batches) for uid in stream.next_batch().non_tensor_batch["uid"]]


def test_uid_is_a_uuid_of_seed_epoch_row_and_occurrence():
    """Each of the four changes it; the same four give it again."""
    base = prompt_uid(1, 0, 5, 0)
    assert str(uuid.UUID(base)) == base
    assert uuid.UUID(base).version == 4
    assert prompt_uid(1, 0, 5, 0) == base
    others = [prompt_uid(2, 0, 5, 0), prompt_uid(1, 1, 5, 0), prompt_uid(1, 0, 6, 0), prompt_uid(1, 0, 5, 1)]
    assert len({base, *others}) == 5


def test_every_use_of_a_row_has_its_own_uid():
    """A row that comes twice in an epoch, or again in the next, is another prompt group."""
    drawn = uids(PromptStream(TwoBatches(), seed=3), batches=4)
    assert len(set(drawn)) == 8


def test_streams_of_one_seed_agree():
    """Two runs of one seed give the same uids in the same order."""
    assert uids(PromptStream(TwoBatches(), 3), 3) == uids(PromptStream(TwoBatches(), 3), 3)


def test_a_new_epoch_begins_when_the_rows_are_used_up():
    """The stream never ends, and says which pass it is in."""
    stream = PromptStream(TwoBatches(), seed=3)
    uids(stream, 2)
    assert stream.epoch == 0
    uids(stream, 1)
    assert stream.epoch == 1
    assert stream.state_dict()["epoch"] == 1
