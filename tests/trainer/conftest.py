"""What the trainer's tests share: the tiny model's folder and tokenizer, and composed configurations."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

import lineage
from lineage import hooks
from lineage.trainer.config import compose, resolved, validate_config
from lineage.trainer.grpo import PPOTrainerSync
from lineage.trainer.models import ModelSource, find_model, load_tokenizer
from lineage.trainer.models.tiny import tool_tokenizer as make_tool_tokenizer
from lineage.trainer.queue import LocalTransferQueue

if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))

# The models are tiny: more threads cost more than they bring, and xdist runs several processes.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny() -> ModelSource:
    """The built-in tiny model."""
    return find_model("tiny")


@pytest.fixture(scope="session")
def tokenizer(tiny: ModelSource):
    """Its tokenizer: one token a printable character."""
    return load_tokenizer(tiny)


class TracedRun:
    """A run of two steps on six groups of two sessions and two ranks: each batch needs padding.

    Attributes:
        trainer: as it is after the last step.
        metrics: by step.
        store: the queue's store.
        rows: of the trace, in order.
    """

    SIZES = (
        "data.train_batch_size=6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=2",
        "data.max_response_length=6",
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=2",
    )

    def __init__(self, folder: Path, *overrides: str) -> None:
        config = compose([*self.SIZES, *overrides])
        validate_config(config)
        self.metrics: dict[int, dict[str, float]] = {}
        self.store = LocalTransferQueue()
        with hooks.recording(folder, config=resolved(config), run={}):
            self.trainer = PPOTrainerSync(config, folder=folder, tracking=self, queue=self.store)
            asyncio.run(self._train())
        self.folder = folder
        self.rows = sorted(pq.read_table(folder / "trace.parquet").to_pylist(), key=lambda row: row["seq"])

    def judged(self, *select: str) -> dict[str, str]:
        """Kind by code, of these codes and families, or of all."""
        return {verdict.code: str(verdict.kind) for verdict in lineage.check(self.folder, select=select).verdicts}

    async def _train(self) -> None:
        await self.trainer.init()
        await self.trainer.fit()

    def log(self, metrics, step: int) -> None:
        """Keep a step's metrics."""
        self.metrics[step] = dict(metrics)

    def select(self, **columns) -> list[dict]:
        """Rows with these values."""
        return [row for row in self.rows if all(row[name] == value for name, value in columns.items())]

    def weights(self) -> torch.Tensor:
        """The actor's parameters as one vector."""
        return torch.cat([tensor.reshape(-1).float() for _, tensor in self.trainer.parts.worker.state_dict()])


@pytest.fixture(scope="session")
def traced_run(tmp_path_factory):
    """Makes a :class:`TracedRun` with overrides."""
    return lambda *overrides: TracedRun(tmp_path_factory.mktemp("run"), *overrides)


@pytest.fixture(scope="session")
def tool_tokenizer():
    """The tokenizer of ``tiny_tools``, without the model, which takes seconds to make."""
    return make_tool_tokenizer()
