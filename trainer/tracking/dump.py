"""The dumps: what was asked and answered, one JSON object a trajectory (verl ``_log_rollout_data``)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lineage import hooks
from lineage.hooks import UserError, parse_key
from lineage.trainer.actor import fetch
from lineage.trainer.protocol import KVBatchMeta
from lineage.trainer.reward.loop_manager import EXTRA_KEYS
from lineage.trainer.training import rows_of


class DumpError(UserError):
    """The dump folder cannot be written."""


@dataclass(frozen=True)
class Sample:
    """One trajectory as text.

    Attributes:
        key: ``{uid}_{session_id}_{index}``.
        input, output: prompt and response without special tokens.
        gts: ground truth of the dataset row; None where it has none.
        score: sum of ``rm_scores``.
        extra: what the scorer returned beside the score.
        is_padding: the row was added to make the batch divide.
    """

    key: str
    input: str
    output: str
    gts: Any
    score: float
    prompt_len: int
    response_len: int
    extra: Mapping[str, Any] = field(default_factory=dict)
    is_padding: bool = False

    def line(self, global_steps: int) -> dict[str, Any]:
        """The object of the dump, by verl's names; no key of the scorer's takes the place of another."""
        parsed = parse_key(self.key)
        return {
            **self.extra,
            "input": self.input,
            "output": self.output,
            "gts": self.gts,
            "score": self.score,
            "step": global_steps,
            "key": self.key,
            "uid": self.key if parsed is None else parsed.uid,
            "is_padding": self.is_padding,
            "prompt_len": self.prompt_len,
            "response_len": self.response_len,
        }


def read_samples(queue: Any, batch: KVBatchMeta, tokenizer: Any) -> list[Sample]:
    """The trajectories of a batch, by uid, session and index; padding rows are no samples."""
    real = batch.select_keys([key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag["is_padding"]])
    if not real.keys:
        return []
    data = fetch(queue, real, ["prompts", "responses", "rm_scores"])
    columns = [rows_of(data[name]) for name in ("prompts", "responses", "rm_scores")]
    models = _objects(queue, real, "reward_model")
    samples = [
        Sample(
            key=key,
            input=tokenizer.decode(prompt.tolist(), skip_special_tokens=True),
            output=tokenizer.decode(response.tolist(), skip_special_tokens=True),
            gts=model.get("ground_truth"),
            score=float(scores.double().sum()),
            prompt_len=tag["prompt_len"],
            response_len=tag["response_len"],
            extra=extra,
            is_padding=tag["is_padding"],
        )
        for key, tag, prompt, response, scores, model, extra in zip(
            real.keys, real.tags, *columns, models, reward_extra_infos(queue, real), strict=True
        )
    ]
    return sorted(samples, key=lambda sample: _place(sample.key))


def write_samples(folder: Path, global_steps: int, samples: Sequence[Sample], setting: str) -> Path:
    """Write ``<folder>/<global_steps>.jsonl``, and trace whose lines they are and what every line says.

    Args:
        setting: the configuration key that names the folder, for the error.

    Raises:
        DumpError: the folder cannot be written.
    """
    path = folder / f"{global_steps}.jsonl"
    lines = [sample.line(global_steps) for sample in samples]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            for line in lines:
                file.write(json.dumps(line, ensure_ascii=False, default=_plain) + "\n")
    except OSError as error:
        raise DumpError(f"{setting}={folder}: {error.strerror or error}") from error
    _record(samples, lines)
    return path


def _record(samples: Sequence[Sample], lines: Sequence[Mapping[str, Any]]) -> None:
    """One row: the score of each line under the key and the tag of its sample, and what every line says."""
    said = set.intersection(*(set(line) for line in lines)) if lines else set()
    attrs = {"lines": str(len(lines)), "columns": ",".join(sorted(said))}
    columns = {"is_padding": [sample.is_padding for sample in samples]}
    scores = np.array([line["score"] for line in lines], dtype=np.float64)
    keys = [sample.key for sample in samples]
    # no partition: a line is written to a file, not to the queue
    hooks.current().produce({"dump": scores}, keys=keys, columns=columns, attrs=attrs, partition=None)


def dump_rollouts(folder: Path, global_steps: int, queue: Any, batch: KVBatchMeta, tokenizer: Any) -> Path:
    """Write the trajectories of a step to ``trainer.rollout_data_dir``; see :func:`write_samples`."""
    return write_samples(folder, global_steps, read_samples(queue, batch, tokenizer), "trainer.rollout_data_dir")


def reward_extra_infos(queue: Any, batch: KVBatchMeta) -> list[Mapping[str, Any]]:
    """What the scorer said of each row beside the score: written by key if colocated, else by the session."""
    names = batch.extra_info.get(EXTRA_KEYS)
    if names is None:
        return [extra.get("reward_extra_info") or {} for extra in _objects(queue, batch, "extra_fields")]
    data = fetch(queue, batch, names)
    columns = [data[name].tolist() for name in names]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _objects(queue: Any, batch: KVBatchMeta, name: str) -> list[Mapping[str, Any]]:
    """A column of mappings; empty ones where the rows have no such column, or something else in it."""
    data = queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[name])
    if name not in data.keys():  # noqa: SIM118 - a TensorDict iterates over rows
        return [{}] * len(batch)
    return [value if isinstance(value, Mapping) else {} for value in data[name].tolist()]


def _place(key: str) -> tuple[str, int, int]:
    parsed = parse_key(key)
    return (key, 0, 0) if parsed is None else (parsed.uid, parsed.session_id, parsed.index)


def _plain(value: Any) -> Any:
    """What JSON lacks: numpy's numbers and arrays, tensors; anything else as its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
