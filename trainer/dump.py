"""The rollout dump: what was asked and answered, one JSON object a trajectory (verl ``_log_rollout_data``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lineage.hooks import UserError
from lineage.trainer.actor import fetch
from lineage.trainer.protocol import KVBatchMeta
from lineage.trainer.training import rows_of


class DumpError(UserError):
    """The dump folder cannot be written."""


def dump_rollouts(folder: Path, global_steps: int, queue: Any, batch: KVBatchMeta, tokenizer: Any) -> Path:
    """Write ``<folder>/<global_steps>.jsonl``: key, text in and out, score, lengths; padding rows are no samples.

    Raises:
        DumpError: the folder cannot be written.
    """
    real = batch.select_keys([key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag["is_padding"]])
    data = fetch(queue, real, ["prompts", "responses", "rm_scores"])
    columns = (rows_of(data[name]) for name in ("prompts", "responses", "rm_scores"))
    path = folder / f"{global_steps}.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            for key, tag, prompt, response, scores in zip(real.keys, real.tags, *columns, strict=True):
                line = {
                    "key": key,
                    "step": global_steps,
                    "input": tokenizer.decode(prompt.tolist()),
                    "output": tokenizer.decode(response.tolist()),
                    "score": float(scores.double().sum()),
                    "prompt_len": tag["prompt_len"],
                    "response_len": tag["response_len"],
                    "is_padding": tag["is_padding"],
                }
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
    except OSError as error:
        raise DumpError(f"trainer.rollout_data_dir={folder}: {error.strerror or error}") from error
    return path
