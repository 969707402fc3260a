"""The streams of prompts: of the training, epoch after epoch, and of the validation; each use of a row has its uid."""

from __future__ import annotations

import hashlib
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lineage.trainer.dataset import collate_fn
from lineage.trainer.protocol import DataProto, object_array
from lineage.trainer.rng import derived_seed

Columns = Mapping[str, torch.Tensor | np.ndarray]


def prompt_uid(seed: int, epoch: int, index: int, occurrence: int) -> str:
    """UUID of one use of a dataset row: the same in every run of the same seed, so that runs compare by key.

    Args:
        seed: the run's seed.
        epoch: pass over the dataset, from 0.
        index: dataset row.
        occurrence: how often the row was drawn before in this epoch.
    """
    return _uuid(f"{seed}/{epoch}/{index}/{occurrence}")


def validation_uid(seed: int, global_steps: int, index: int) -> str:
    """UUID of a validation row in the validation after step ``global_steps``; no training prompt has it."""
    return _uuid(f"{seed}/val/{global_steps}/{index}")


@dataclass
class Draw:
    """Prompts drawn one after the other from one pass over the dataset.

    Attributes:
        epoch: the pass, from 0.
        drawn: rows of it that were drawn before these.
        rows: how many they are.
        again: dataset rows among them that the pass had drawn before.
    """

    epoch: int
    drawn: int
    rows: int = 0
    again: list[int] = field(default_factory=list)

    def attrs(self) -> dict[str, str]:
        """As a trace row says it."""
        said = {"epoch": str(self.epoch), "drawn": str(self.drawn)}
        return {**said, "again": ",".join(map(str, self.again))} if self.again else said


class PromptStream:
    """Endless batches of prompts (verl ``_next_train_batch``).

    Args:
        dataloader: one epoch of collated batches; its place can be saved.
        seed: the run's seed, for the uids.
    """

    def __init__(self, dataloader: StatefulDataLoader, seed: int) -> None:
        self.dataloader = dataloader
        self.seed = seed
        self.epoch = 0
        self._drawn: Counter[int] = Counter()
        self._batches: Iterator[Columns] | None = None

    @property
    def drawn(self) -> int:
        """Rows drawn from the present pass over the dataset."""
        return self._drawn.total()

    def next_batch(self, num_prompts: int | None = None) -> DataProto:
        """The next prompts with a ``uid`` a row; a new epoch begins when the dataset is used up.

        Args:
            num_prompts: a multiple of what the dataloader fetches at a time; None takes one fetch.

        Returns:
            The prompts; ``meta_info["draws"]`` says from which epochs they are (:class:`Draw`, in order).
        """
        draws: list[Draw] = []
        chunks = [self._fetch_one_gen_batch(draws)]
        while num_prompts is not None and sum(map(_rows, chunks)) < num_prompts:
            chunks.append(self._fetch_one_gen_batch(draws))
        if num_prompts is not None and sum(map(_rows, chunks)) > num_prompts:
            raise ValueError(f"{num_prompts} prompts are no multiple of the {_rows(chunks[0])} of one fetch")
        batch = DataProto.from_dict(dict(_joined(chunks)))
        batch.meta_info = {"draws": draws}
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The place in the stream: dataloader, epoch, and what was drawn in it."""
        return {"dataloader": self.dataloader.state_dict(), "epoch": self.epoch, "drawn": dict(self._drawn)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved place."""
        self.dataloader.load_state_dict(state["dataloader"])
        self.epoch = state["epoch"]
        self._drawn = Counter(state["drawn"])
        self._batches = None

    def _fetch_one_gen_batch(self, draws: list[Draw]) -> Columns:
        columns = self._next_columns()
        if not draws or draws[-1].epoch != self.epoch:
            draws.append(Draw(self.epoch, self.drawn))
        uids, draw = [], draws[-1]
        for index in map(int, columns["index"]):
            uids.append(prompt_uid(self.seed, self.epoch, index, self._drawn[index]))
            draw.rows += 1
            draw.again += [index] if self._drawn[index] else []
            self._drawn[index] += 1
        return {**columns, "uid": object_array(uids)}

    def _next_columns(self) -> Columns:
        if self._batches is None:
            self._batches = iter(self.dataloader)
        columns = next(self._batches, None)
        if columns is None:
            self.epoch += 1
            self._drawn.clear()
            self._batches = iter(self.dataloader)
            columns = next(self._batches)
        return columns


class ValidationPrompts:
    """The rows of ``data.val_files``, all of them each time.

    It has no state: what a validation asks follows from its step, so that a resumed run asks the same, and it draws
    from no generator that the training draws from.

    Args:
        dataset: rows by position.
        batch_size: rows generated together; None takes all.
        shuffle: in an order of its own each time.
        seed: the run's seed.
    """

    def __init__(self, dataset: Dataset[Any], *, batch_size: int | None, shuffle: bool, seed: int) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def batches(self, global_steps: int) -> Iterator[DataProto]:
        """The rows of the validation after step ``global_steps``, each with its ``uid``."""
        order = list(range(len(self)))
        if self.shuffle:
            np.random.default_rng(derived_seed(self.seed, "val", global_steps)).shuffle(order)
        size = self.batch_size or len(order)
        for start in range(0, len(order), size):
            columns = collate_fn([self.dataset[place] for place in order[start : start + size]])
            uids = [validation_uid(self.seed, global_steps, int(index)) for index in columns["index"]]
            yield DataProto.from_dict({**columns, "uid": object_array(uids)})


def _uuid(text: str) -> str:
    return str(uuid.UUID(bytes=hashlib.blake2b(text.encode(), digest_size=16).digest(), version=4))


def _rows(columns: Columns) -> int:
    return len(columns["index"])


def _joined(chunks: Sequence[Columns]) -> Columns:
    """Columns of several fetches as those of one; a row has None where its fetch lacked a column."""
    if len(chunks) == 1:
        return chunks[0]
    joined: dict[str, torch.Tensor | np.ndarray] = {}
    for name in dict.fromkeys(name for chunk in chunks for name in chunk):
        columns = [chunk.get(name) for chunk in chunks]
        tensors = [column for column in columns if isinstance(column, torch.Tensor)]
        if len(tensors) == len(columns):
            joined[name] = torch.cat(tensors)
        else:
            filled = [[None] * _rows(chunk) if name not in chunk else list(chunk[name]) for chunk in chunks]
            joined[name] = object_array([value for column in filled for value in column])
    return joined
