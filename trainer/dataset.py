"""Prompts in: verl's ``RLHFDataset``, its ``collate_fn`` and a seeded loader whose place can be saved."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler
from transformers import PreTrainedTokenizerBase

from lineage.hooks import UserError, first_line
from lineage.trainer.protocol import object_array
from lineage.trainer.tasks import is_task, make_rows

Row = dict[str, Any]

logger = logging.getLogger(__name__)

MULTI_MODAL = ("images", "videos", "audios")  # verl's columns; what is in them nobody here looks at


class DatasetError(UserError):
    """Prompts that cannot be read or used: names the file and, where there is one, the row."""


class RLHFDataset(Dataset):
    """Rows in verl's prompt schema, as raw messages; the chat template is applied in the agent loop.

    Args:
        files: parquet, json or jsonl file(s), or ``builtin:<task>``, ``reasoning_gym:<task>``.
        tokenizer: used to measure the prompts.
        config: the ``data`` section.
        seed: of made tasks.
        max_samples: rows to keep or make; -1 keeps all.
        tool_schemas: by name, what the chat template is told in the prompts of rows for ``tool_agent``.
        default_agent_loop: the loop of rows without ``agent_name``.

    Raises:
        DatasetError: a missing or malformed file, a row without a prompt, no rows, an overlong prompt under
            ``truncation=error`` when they are not filtered.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        config: DictConfig,
        *,
        seed: int,
        max_samples: int = -1,
        tool_schemas: Mapping[str, Mapping[str, Any]] | None = None,
        default_agent_loop: str = "single_turn_agent",
    ) -> None:
        self.tokenizer = tokenizer
        self.tool_schemas = dict(tool_schemas or {})
        self.default_agent_loop = default_agent_loop
        self.prompt_key: str = config.prompt_key
        self.max_prompt_length: int = config.max_prompt_length
        self.truncation: str = config.truncation
        self.template_kwargs: dict[str, Any] = OmegaConf.to_container(config.apply_chat_template_kwargs)
        self._rows: list[Row] = []
        self._places: list[tuple[str, int]] = []
        for name in [files] if isinstance(files, str) else list(files or ()):
            rows = _read(str(name), seed, max_samples)
            for place, row in enumerate(rows):
                self._check_prompt(str(name), place, row)
            self._rows.extend(rows)
            self._places.extend((str(name), place) for place in range(len(rows)))
        if max_samples >= 0:
            del self._rows[max_samples:], self._places[max_samples:]
        names = files if isinstance(files, str) else ", ".join(map(str, files or ()))
        if not self._rows:
            raise DatasetError(f"{names or 'data.train_files'}: no rows")
        self._kept = list(range(len(self._rows)))
        if config.filter_overlong_prompts:
            self._kept = [index for index in self._kept if self.prompt_length(index) <= self.max_prompt_length]
            if not self._kept:
                raise DatasetError(
                    f"{names}: every prompt is longer than data.max_prompt_length={self.max_prompt_length} tokens"
                )
        elif self.truncation == "error":
            for index in self._kept:
                self._check_length(index)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def dropped(self) -> int:
        """Rows left out because their prompt is too long."""
        return len(self._rows) - len(self._kept)

    def __getitem__(self, item: int) -> Row:
        """One row for the agent loop.

        Returns:
            ``raw_prompt`` (message list), ``data_source``, ``reward_model``, ``extra_info`` (its ``index`` is the row's
            own, or that of this dataset), ``tools_kwargs`` and ``interaction_kwargs`` out of it, ``multi_modal_data``
            (``images``, ``videos``, ``audios``, where the row has some; opaque), ``index`` (row number over all files,
            before filtering), ``dummy_tensor`` ``(1,)`` uint8, and the row's other columns.
        """
        index = self._kept[item]
        row = dict(self._rows[index])
        raw_prompt = row.pop(self.prompt_key)
        extra_info = {"index": index, **(row.pop("extra_info", None) or {})}
        media = {name: row.pop(name, None) for name in MULTI_MODAL}
        known = {
            "raw_prompt": raw_prompt,
            "data_source": row.pop("data_source", None),
            "reward_model": row.pop("reward_model", None) or {},
            "extra_info": extra_info,
            "tools_kwargs": extra_info.get("tools_kwargs") or {},
            "interaction_kwargs": extra_info.get("interaction_kwargs") or {},
            "multi_modal_data": {name: objects for name, objects in media.items() if objects},
            "index": index,
            "dummy_tensor": torch.zeros(1, dtype=torch.uint8),
        }
        if extra_info.get("need_tools_kwargs") and not known["tools_kwargs"]:
            name, place = self._places[index]
            logger.warning("%s: row %d has need_tools_kwargs and no tools_kwargs", name, place)
        return {**row, **known}

    def prompt_length(self, index: int) -> int:
        """Tokens of row ``index``'s prompt after the chat template."""
        row = self._rows[index]
        tokens = self.tokenizer.apply_chat_template(
            row[self.prompt_key],
            tools=self._tools_of(row),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **self.template_kwargs,
        )
        return len(tokens)

    def _tools_of(self, row: Row) -> list[Mapping[str, Any]] | None:
        """Schemas the tool agent loop gives the template for a row; None for a row of another loop."""
        if (row.get("agent_name") or self.default_agent_loop) != "tool_agent":
            return None
        selected = (row.get("extra_info") or {}).get("tool_selection") or self.tool_schemas
        return [self.tool_schemas[name] for name in selected if name in self.tool_schemas] or None

    def _check_length(self, index: int) -> None:
        tokens = self.prompt_length(index)
        if tokens > self.max_prompt_length:
            name, place = self._places[index]
            raise DatasetError(
                f"{name}: the prompt of row {place} has {tokens} tokens, data.max_prompt_length is "
                f"{self.max_prompt_length}; raise it, or set data.filter_overlong_prompts=true or data.truncation=left"
            )

    def _check_prompt(self, name: str, place: int, row: Any) -> None:
        if not isinstance(row, Mapping):
            raise DatasetError(f"{name}: row {place} is not an object but {type(row).__name__}")
        messages = row.get(self.prompt_key)
        if messages is None:
            raise DatasetError(f"{name}: row {place} has no {self.prompt_key!r} (data.prompt_key)")
        good = isinstance(messages, list) and bool(messages)
        if not good or not all(isinstance(message, Mapping) and "role" in message for message in messages):
            raise DatasetError(
                f"{name}: {self.prompt_key!r} of row {place} is not a list of messages "
                '[{"role": "user", "content": "..."}]'
            )


def collate_fn(rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor | np.ndarray]:
    """A list of rows as columns: tensors stacked along the batch, everything else object arrays (verl)."""
    columns: dict[str, torch.Tensor | np.ndarray] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        if all(isinstance(value, torch.Tensor) for value in values):
            columns[name] = torch.stack(values)  # type: ignore[arg-type]
        else:
            columns[name] = object_array(values)
    return columns


def make_dataloader(
    dataset: RLHFDataset, *, batch_size: int, shuffle: bool, seed: int, drop_last: bool = True
) -> StatefulDataLoader:
    """A loader of ``collate_fn`` batches in a seeded order; ``state_dict()`` is its place.

    Raises:
        DatasetError: fewer rows than one batch.
    """
    if drop_last and len(dataset) < batch_size:
        raise DatasetError(f"{len(dataset)} rows are fewer than data.train_batch_size={batch_size}")
    sampler = RandomSampler(dataset, generator=_generator(seed)) if shuffle else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata 0.11 on torch 2.13
        return StatefulDataLoader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            drop_last=drop_last,
            collate_fn=collate_fn,
            num_workers=0,
            generator=_generator(seed),  # else every epoch draws a seed from the global generator
        )


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _read(name: str, seed: int, max_samples: int) -> list[Row]:
    if is_task(name):
        return make_rows(name, max_samples, seed)
    path = Path(name).expanduser()
    readers = {".parquet": _read_parquet, ".json": _read_json, ".jsonl": _read_jsonl}
    if path.suffix not in readers:
        raise DatasetError(f"{name}: not a parquet, json or jsonl file, nor builtin:<task> or reasoning_gym:<task>")
    if not path.is_file():
        raise DatasetError(f"{name}: no such file")
    return readers[path.suffix](path)


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(f"{path}: not a readable parquet file: {first_line(error)}") from error


def _read_json(path: Path) -> list[Row]:
    """A JSON array of rows, or rows one a line."""
    text = _text(path)
    if not text.lstrip().startswith("["):
        return _rows_of_lines(path, text.split("\n"))
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DatasetError(f"{path}: not JSON at line {error.lineno}: {error.msg}") from error


def _read_jsonl(path: Path) -> list[Row]:
    return _rows_of_lines(path, _text(path).split("\n"))  # a string may hold what else ends a line, U+2028 above all


def _rows_of_lines(path: Path, lines: Iterable[str]) -> list[Row]:
    rows = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise DatasetError(f"{path}: not JSON at line {number}: {error.msg}") from error
    return rows


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path}: not readable as UTF-8 text: {first_line(error)}") from error
