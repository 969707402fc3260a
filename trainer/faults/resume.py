"""Faults of the stream of prompts: what a run that goes on from a checkpoint draws again, or never.

Each does to the stream, before a step draws from it, what a false restore does at the start of a run.
"""

from __future__ import annotations

from typing import Any

from lineage.trainer.dataset import make_dataloader
from lineage.trainer.faults.registry import Seams, fault
from lineage.trainer.prompts import PromptStream
from lineage.trainer.protocol import DataProto

NEXT_BATCH = "lineage.trainer.prompts.PromptStream.next_batch"


@fault("KEY007", "dataset", reports=["oi-data-prep-state-not-restored"])
def loader_starts_over() -> Seams:
    """The loader's state is restored to where nobody reads it: the run goes on with the first rows of the epoch."""

    def draw(original: Any, stream: PromptStream, num_prompts: int) -> DataProto:
        loader = stream.dataloader
        stream.dataloader = make_dataloader(
            loader.dataset, batch_size=loader.batch_size, shuffle=True, seed=loader.generator.initial_seed()
        )
        stream._batches = None
        return original(stream, num_prompts)

    return {NEXT_BATCH: draw}


@fault("KEY007", "dataset", reports=["nemo-prompt-skips-on-resume"])
def cursor_ahead_of_training() -> Seams:
    """The checkpoint keeps the cursor of a loader that has fetched ahead: prompts in flight are never trained on."""

    def draw(original: Any, stream: PromptStream, num_prompts: int) -> DataProto:
        original(stream, num_prompts)
        return original(stream, num_prompts)

    return {NEXT_BATCH: draw}


@fault("KEY007", "dataset", reports=["verl-resume-epoch-boundary"])
def epoch_begins_used_up() -> Seams:
    """The exhausted state of one epoch's loader is given to the next epoch, which is over before it has begun."""

    def draw(original: Any, stream: PromptStream, num_prompts: int) -> DataProto:
        stream._batches = iter(())
        stream.epoch += 1
        stream._drawn.clear()
        return original(stream, num_prompts)

    return {NEXT_BATCH: draw}


@fault("KEY007", "dataset", "data.train_max_samples=9")
def counters_of_the_last_epoch() -> Seams:
    """The order of the rows is restored and their number is not: the epoch ends before all of them were drawn."""

    def draw(original: Any, stream: PromptStream, num_prompts: int) -> DataProto:
        stream._batches = iter(())
        return original(stream, num_prompts)

    return {NEXT_BATCH: draw}
