"""The stream of prompts: batches of the dataset, epoch after epoch, each row with a uid of its own."""

from __future__ import annotations

import hashlib
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from lineage.trainer.protocol import DataProto, object_array


def prompt_uid(seed: int, epoch: int, index: int, occurrence: int) -> str:
    """UUID of one use of a dataset row: the same in every run of the same seed, so that runs compare by key.

    Args:
        seed: the run's seed.
        epoch: pass over the dataset, from 0.
        index: dataset row.
        occurrence: how often the row was drawn before in this epoch.
    """
    digest = hashlib.blake2b(f"{seed}/{epoch}/{index}/{occurrence}".encode(), digest_size=16).digest()
    return str(uuid.UUID(bytes=digest, version=4))


class PromptStream:
    """Endless batches of prompts (verl ``_fetch_one_gen_batch``).

    Args:
        dataloader: one epoch of collated batches; its place can be saved.
        seed: the run's seed, for the uids.
    """

    def __init__(self, dataloader: StatefulDataLoader, seed: int) -> None:
        self.dataloader = dataloader
        self.seed = seed
        self.epoch = 0
        self._drawn: Counter[int] = Counter()
        self._batches: Iterator[dict[str, Any]] | None = None

    def next_batch(self) -> DataProto:
        """The next batch with a ``uid`` a row; a new epoch begins when the dataset is used up."""
        columns = self._next_columns()
        uids = []
        for index in columns["index"]:
            uids.append(prompt_uid(self.seed, self.epoch, int(index), self._drawn[int(index)]))
            self._drawn[int(index)] += 1
        return DataProto.from_dict({**columns, "uid": object_array(uids)})

    def state_dict(self) -> dict[str, Any]:
        """The place in the stream: dataloader, epoch, and what was drawn in it."""
        return {"dataloader": self.dataloader.state_dict(), "epoch": self.epoch, "drawn": dict(self._drawn)}

    def _next_columns(self) -> dict[str, Any]:
        if self._batches is None:
            self._batches = iter(self.dataloader)
        columns = next(self._batches, None)
        if columns is None:
            self.epoch += 1
            self._drawn.clear()
            self._batches = iter(self.dataloader)
            columns = next(self._batches)
        return columns
