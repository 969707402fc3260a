"""Prompts of a step or of a validation: rows of the dataset, each registered in the queue under its uid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lineage import hooks
from lineage.hooks import traced
from lineage.trainer.parts import Parts
from lineage.trainer.prompts import Draw
from lineage.trainer.protocol import DataProto
from lineage.trainer.replay_buffer import VALIDATION
from lineage.trainer.rollout.base import SamplingParams

PARTITION = "train"
_DATASET_FIELDS = ("raw_prompt", "data_source", "reward_model", "extra_info", "index")


@traced("dataset", component="RLHFDataset.__getitem__", consumer="PPOTrainer._add_batch_to_generate")
def next_train_batch(parts: Parts, global_steps: int, num_prompts: int | None = None) -> DataProto:
    """The next prompts of the dataset, each with its uid (verl ``_next_train_batch``).

    Args:
        num_prompts: how many; None takes ``data.train_batch_size``.
    """
    batch = parts.stream.next_batch(num_prompts or parts.config.data.train_batch_size)
    _record(batch, batch.meta_info["draws"])
    batch.meta_info = {
        "global_steps": global_steps,
        "partition_id": PARTITION,
        "expected": parts.config.actor_rollout_ref.rollout.n,
        "sampling_params": sampling_params(parts.config),
    }
    return batch


@traced("dataset", component="RLHFDataset.__getitem__", consumer="PPOTrainer._validate")
def ask_validation(parts: Parts, batch: DataProto, global_steps: int) -> DataProto:
    """A batch of validation prompts, made ready for the agent loop: its own partition, sessions and sampling."""
    _record(batch)
    batch.meta_info = {
        "global_steps": global_steps,
        "partition_id": VALIDATION,
        "expected": parts.config.actor_rollout_ref.rollout.val_kwargs.n,
        "sampling_params": validation_sampling_params(parts.config),
        "validate": True,
    }
    return batch


@traced("prompt", component="PPOTrainer._submit_batch_to_rollout", consumer="AgentLoopWorker.run")
def register_prompts(parts: Parts, batch: DataProto) -> None:
    """Mark each uid of a batch as a pending prompt."""
    columns, meta = batch.non_tensor_batch, batch.meta_info
    uids = [str(uid) for uid in columns["uid"]]
    expected = [meta["expected"]] * len(uids)
    hooks.current().produce(
        {"uid": uids},
        keys=uids,
        entity="prompt",
        columns={
            "source_index": [int(index) for index in columns["index"]],
            "data_source": [str(source) for source in columns["data_source"]],
            "expected": expected,
        },
    )
    tag = {"is_prompt": True, "status": "pending", "global_steps": meta["global_steps"]}
    tags = [{**tag, "expected": sessions} for sessions in expected]
    parts.queue.kv_batch_put(keys=uids, partition_id=meta["partition_id"], tags=tags)


def sampling_params(config: Any) -> SamplingParams:
    """How the sessions of the training sample."""
    return _sampling_params(config, config.actor_rollout_ref.rollout)


def validation_sampling_params(config: Any) -> SamplingParams:
    """How the sessions of a validation sample: ``rollout.val_kwargs``."""
    return _sampling_params(config, config.actor_rollout_ref.rollout.val_kwargs)


def _sampling_params(config: Any, drawn: Any) -> SamplingParams:
    rollout = config.actor_rollout_ref.rollout
    return SamplingParams(
        temperature=drawn.temperature,
        top_p=drawn.top_p,
        top_k=drawn.top_k,
        do_sample=drawn.do_sample,
        ignore_eos=rollout.ignore_eos,
        logprobs_mode=rollout.logprobs_mode,
        seed=config.trainer.seed,
    )


def _record(batch: DataProto, draws: Sequence[Draw] = ()) -> None:
    """Trace the rows of the dataset; those of a training by the pass over the dataset they are drawn in."""
    columns = batch.non_tensor_batch
    indexes = [int(index) for index in columns["index"]]
    rows: dict[str, Any] = {name: list(columns[name]) for name in _DATASET_FIELDS if name in columns}
    rows.update(batch.batch.items())
    sources = [str(source) for source in columns["data_source"]]
    parts: list[tuple[int, dict[str, str] | None]] = [(draw.rows, draw.attrs()) for draw in draws]
    start = 0
    for size, attrs in parts or [(len(indexes), None)]:
        part = slice(start, start + size)
        hooks.current().produce(
            {name: values[part] for name, values in rows.items()},
            keys=[str(index) for index in indexes[part]],
            entity="dataset_row",
            columns={"source_index": indexes[part], "data_source": sources[part]},
            attrs={**(attrs or {}), **_agent_names(batch, part)} or None,
        )
        start += size


def _agent_names(batch: DataProto, part: slice) -> dict[str, str]:
    """The agent loops these rows ask for: one of the user's own may draw as it likes."""
    column = batch.non_tensor_batch.get("agent_name")
    named = set() if column is None else {name for name in column[part] if isinstance(name, str) and name}
    return {"agent_name": ",".join(sorted(named))} if named else {}
