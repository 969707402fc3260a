"""Faults of token identity."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from lineage.trainer.faults.registry import Seams, fault
from lineage.trainer.faults.seams import TRAJECTORY_FIELDS, tiny_tokenizer
from lineage.trainer.protocol import nested_from_list
from lineage.trainer.training import rows_of


@fault("TOK001", "rollout")
def retokenised_input_ids() -> Seams:
    """The sequence is decoded to text, normalised and encoded again: as many tokens, and others."""

    # a subword tokenizer drifts without a normaliser; the tiny one has a token a character, so lower case does it
    def write(original: Any, *args: Any) -> TensorDict:
        fields, tokenizer = original(*args), tiny_tokenizer()
        texts = [tokenizer.decode(ids) for ids in rows_of(fields["input_ids"])]
        encoded = [tokenizer.encode(text.lower(), add_special_tokens=False) for text in texts]
        fields["input_ids"] = nested_from_list([torch.tensor(ids) for ids in encoded])
        return fields

    return {TRAJECTORY_FIELDS: write}
