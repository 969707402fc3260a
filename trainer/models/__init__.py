"""Models and tokenizers: built in, made from a package, or a local folder; never the network.

Enters: ``model.path``. Leaves: a Hugging Face folder, the module, its tokenizer. Imported by ``setup`` and
``lineage run``.
"""

from lineage.trainer.models.find import (
    ModelError,
    ModelFacts,
    ModelSource,
    cache_folder,
    declared_eos_token_ids,
    eos_token_ids,
    find_model,
    is_made,
    load_model,
    load_tokenizer,
    vocab_size,
)

__all__ = [
    "ModelError",
    "ModelFacts",
    "ModelSource",
    "cache_folder",
    "declared_eos_token_ids",
    "eos_token_ids",
    "find_model",
    "is_made",
    "load_model",
    "load_tokenizer",
    "vocab_size",
]
