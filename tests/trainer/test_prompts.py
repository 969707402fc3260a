"""The streams of prompts and their uids."""

from __future__ import annotations

import uuid

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from lineage.trainer.dataset import make_dataloader
from lineage.trainer.prompts import PromptStream, ValidationPrompts, prompt_uid, validation_uid


class Rows(Dataset):
    """So many rows; every second one has a column the others lack."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        row = {"index": index, "raw_prompt": [{"role": "user", "content": str(index)}], "dummy_tensor": torch.zeros(1)}
        return {**row, "agent_name": "tool_agent"} if index % 2 else row


def stream(rows=5, fetched=2, seed=3):
    """A shuffled stream."""
    return PromptStream(make_dataloader(Rows(rows), batch_size=fetched, shuffle=True, seed=seed), seed)


def drawn(prompts, batches, size=None):
    """(row, uid) of the next batches."""
    columns = [prompts.next_batch(size).non_tensor_batch for _ in range(batches)]
    return [pair for column in columns for pair in zip(column["index"], column["uid"], strict=True)]


def test_uid_is_a_uuid_of_seed_epoch_row_and_occurrence():
    """Each of the four changes it; the same four give it again."""
    base = prompt_uid(1, 0, 5, 0)
    assert str(uuid.UUID(base)) == base
    assert uuid.UUID(base).version == 4
    assert prompt_uid(1, 0, 5, 0) == base
    others = [prompt_uid(2, 0, 5, 0), prompt_uid(1, 1, 5, 0), prompt_uid(1, 0, 6, 0), prompt_uid(1, 0, 5, 1)]
    assert len({base, *others}) == 5


def test_every_use_of_a_row_has_its_own_uid():
    """A row that comes again in the next epoch is another prompt group."""
    uids = [uid for _, uid in drawn(stream(), batches=10)]
    assert len(set(uids)) == 20


def test_streams_of_one_seed_agree():
    """Two runs of one seed give the same rows and uids in the same order; another seed does not."""
    assert drawn(stream(), 6) == drawn(stream(), 6)
    assert drawn(stream(), 6) != drawn(stream(seed=4), 6)


def test_a_new_epoch_begins_when_the_rows_are_used_up():
    """The stream never ends, and says which pass it is in."""
    prompts = stream(rows=4)
    drawn(prompts, 2)
    assert prompts.epoch == 0
    drawn(prompts, 1)
    assert prompts.epoch == 1


@given(
    rows=st.integers(2, 7),
    fetched=st.integers(1, 2),
    several=st.integers(1, 3),
    before=st.integers(0, 8),
    more=st.just(4),
)
@settings(max_examples=25)
def test_a_restored_stream_goes_on(rows, fetched, several, before, more):
    """Wherever it was saved, inside an epoch or at its end: the rows, their order and their uids are those to come."""
    prompts, size = stream(rows, fetched), fetched * several
    drawn(prompts, before, size)
    state = prompts.state_dict()
    expected = drawn(prompts, more, size)
    other = stream(rows, fetched)
    other.load_state_dict(state)
    assert drawn(other, more, size) == expected
    assert other.epoch == prompts.epoch


@given(several=st.integers(1, 4))
@settings(max_examples=5)
def test_several_fetches_are_one_batch(several):
    """Prompts fetched one by one come in the order of one fetch; a column some rows lack is None there."""
    whole = PromptStream(make_dataloader(Rows(8), batch_size=several, shuffle=True, seed=3), 3).next_batch()
    batch = stream(rows=8, fetched=1).next_batch(several)
    assert batch.non_tensor_batch["uid"].tolist() == whole.non_tensor_batch["uid"].tolist()
    assert batch.batch["dummy_tensor"].shape == (several, 1)
    names = [batch.non_tensor_batch.get("agent_name", [None] * several)[row] for row in range(several)]
    odd = [index % 2 == 1 for index in batch.non_tensor_batch["index"]]
    assert [name is not None for name in names] == odd


def test_validation_asks_every_row_each_time():
    """All rows in batches of the size asked, in order; the uids of another validation are others."""
    prompts = ValidationPrompts(Rows(5), batch_size=2, shuffle=False, seed=3)
    batches = [batch.non_tensor_batch for batch in prompts.batches(7)]
    assert [list(batch["index"]) for batch in batches] == [[0, 1], [2, 3], [4]]
    assert batches[0]["uid"].tolist() == [validation_uid(3, 7, 0), validation_uid(3, 7, 1)]
    assert validation_uid(3, 8, 0) not in [validation_uid(3, 7, row) for row in range(5)]


def test_a_shuffled_validation_follows_from_its_step():
    """validation_shuffle has an order of its own each step, and draws from no generator."""
    prompts = ValidationPrompts(Rows(12), batch_size=None, shuffle=True, seed=3)
    before = torch.get_rng_state()
    orders = [list(next(prompts.batches(step)).non_tensor_batch["index"]) for step in (1, 2, 1)]
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[0]) == list(range(12))
    assert torch.equal(torch.get_rng_state(), before)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 99))
def test_any_seed_shuffles_a_validation(seed, step):
    """A negative one too, which numpy's generators do not take."""
    prompts = ValidationPrompts(Rows(4), batch_size=None, shuffle=True, seed=seed)
    assert sorted(next(prompts.batches(step)).non_tensor_batch["index"]) == list(range(4))
