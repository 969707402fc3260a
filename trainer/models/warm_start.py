"""Supervised steps on demonstrations of the tool tasks, so that there is a small policy that calls tools.

A demonstration is a question, the call it asks for, the tool's answer and the policy's. Every question is of one width,
and so is every answer: what is to be copied then lies at the same distance each time, which a model of two layers
learns within seconds.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lineage.trainer.tasks.tool_use import QUESTIONS, ToolQuestion
from lineage.trainer.tools.config import load_tools

DEMONSTRATIONS = 1200
STEPS = 150
BATCH_SIZE = 16
LEARNING_RATE = 8e-3
WARM_UP = 20

_IGNORED = -100  # cross_entropy's own mark of a position without a target


def warm_start(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, *, seed: int, steps: int = STEPS) -> None:
    """Train the model, in place, to say what the demonstrations' policy says.

    Computed on one thread, so that the weights do not depend on how many the run has. Draws from no global generator.

    Args:
        seed: of the demonstrations.
    """
    demonstrations = _demonstrations(tokenizer, min(DEMONSTRATIONS, steps * BATCH_SIZE), seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARM_UP) * (1 - step / steps)
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model.train()
        for step in range(steps):
            start = step * BATCH_SIZE % len(demonstrations)
            rows = demonstrations[start : start + BATCH_SIZE]
            loss = _loss(model, rows, tokenizer.pad_token_id)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        model.eval()
    finally:
        torch.set_num_threads(threads)


def _loss(model: torch.nn.Module, rows: Sequence[tuple[Tensor, Tensor]], pad_token_id: int) -> Tensor:
    """Mean cross-entropy of the policy's tokens. Rows are padded on the right, where a causal model does not look."""
    pad = torch.nn.utils.rnn.pad_sequence
    input_ids = pad([ids for ids, _ in rows], batch_first=True, padding_value=pad_token_id)
    labels = pad([label for _, label in rows], batch_first=True, padding_value=_IGNORED)
    logits = model(input_ids=input_ids).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED)


def _demonstrations(tokenizer: PreTrainedTokenizerBase, size: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Token ids and labels ``(seq)`` of each demonstration; only the policy's tokens have a label.

    The prompt names both tools in most, the one it needs in some, and none in some.
    """
    draw = random.Random(f"warm_start:{seed}")
    schemas = {name: tool.tool_schema for name, tool in load_tools(None).items()}
    tasks = sorted(QUESTIONS)
    texts: list[str] = []
    for _ in range(size):
        question = QUESTIONS[draw.choice(tasks)](draw)
        shown = draw.choice((tasks, tasks, tasks, [question.tool], []))
        texts.extend(_parts(tokenizer, question, [schemas[name] for name in shown]))
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    rows = []
    for start in range(0, len(ids), _PARTS):
        parts = ids[start : start + _PARTS]
        labels = [part if place % 2 else [_IGNORED] * len(part) for place, part in enumerate(parts)]
        rows.append((torch.tensor([*chain(*parts)]), torch.tensor([*chain(*labels)])))
    return rows


_PARTS = 4  # prompt, call, observation, answer: what the policy does not say and what it says, by turns


def _parts(tokenizer: PreTrainedTokenizerBase, question: ToolQuestion, tools: list[dict]) -> list[str]:
    """A demonstration as the chat template writes it, cut where the speaker changes."""
    messages = question.demonstration()
    parts, before = [], ""
    for count in range(1, len(messages) + 1):
        text = tokenizer.apply_chat_template(
            messages[:count], tools=tools or None, add_generation_prompt=count % 2 == 1, tokenize=False
        )
        parts.append(text[len(before) :])
        before = text
    return parts
