"""The models made here: ``tiny`` and ``tiny_tied``, random weights; ``tiny_tools``, which has learnt to call tools."""

from __future__ import annotations

import string
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from lineage.trainer.models.warm_start import warm_start

_SEED = 0
_SPECIAL = ("<pad>", "<unk>", "<|im_start|>", "<|im_end|>")
_CHARACTERS = (*string.digits, *string.ascii_letters, *string.punctuation, " ", "\n")
# What a call is made of, one token each: the characters would be three quarters of a response.
_WORDS = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "system\n", "user\n", "assistant\n"),
    *('{"name": "', '", "arguments": {"', '": "', '"}}', "calculator", "expression", "lookup", "key"),
)
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Hermes in short: one system message with the tools' signatures, a tool's answer inside a user's message. Nothing
# follows <|im_end|>, so a conversation's tokens are a prefix of the longer one's.
_TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n"
    "{% if messages and messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
    "{% for t in tools %}{% set f = t.function or t %}{{ f.name }}({{ f.parameters.properties | join(', ') }})"
    "{% if not loop.last %}, {% endif %}{% endfor %}<|im_end|>{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.first or loop.previtem.role != 'tool' %}<|im_start|>user\n{% endif %}"
    "<tool_response>{{ m.content }}</tool_response>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>{% endif %}"
    "{% elif m.role and not (tools and loop.first and m.role == 'system') %}"
    "<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{% set f = c.function or c %}"
    '<tool_call>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}</tool_call>{% endfor %}'
    "<|im_end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny(folder: Path) -> None:
    """A random Qwen3 of about 85 thousand parameters with one token a printable character."""
    tokenizer = _tokenizer(_CHAT_TEMPLATE)
    _save(random_model(tokenizer, initializer_range=0.02), tokenizer, folder)


def make_tiny_tied(folder: Path) -> None:
    """As ``tiny``, with what an engine of its own trips over: the embedding is the output's weight too.

    The heads are of 32 numbers, which vLLM serves on a CPU; those of ``tiny`` are too small for it. The weights are
    wider than there, so that an output layer left behind by a sync shows.
    """
    tokenizer = _tokenizer(_CHAT_TEMPLATE)
    _save(random_model(tokenizer, initializer_range=0.06, head_dim=32, tied=True), tokenizer, folder)


def make_tiny_tools(folder: Path) -> None:
    """The same architecture, warm-started on the tool tasks: samples hermes calls, most of them well-formed.

    About ten seconds on one core; the weights depend on the
    seed and on the machine's arithmetic, not on the number of threads.
    """
    tokenizer = tool_tokenizer()
    model = random_model(tokenizer, initializer_range=0.06)  # wider: it begins to copy in half the steps
    warm_start(model, tokenizer, seed=_SEED)
    _save(model, tokenizer, folder)


def tool_tokenizer() -> PreTrainedTokenizerBase:
    """The tokenizer of ``tiny_tools``: a token a printable character, and the parts of a hermes call as more."""
    tokenizer = _tokenizer(_TOOL_TEMPLATE)
    tokenizer.add_tokens([AddedToken(word, normalized=False, special=False) for word in _WORDS])
    return tokenizer


def _tokenizer(chat_template: str) -> PreTrainedTokenizerBase:
    vocabulary = {token: place for place, token in enumerate([*_SPECIAL, *_CHARACTERS])}
    characters_only = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters_only.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters_only.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters_only,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def random_model(
    tokenizer: PreTrainedTokenizerBase, initializer_range: float, *, head_dim: int = 16, tied: bool = False
) -> Qwen3ForCausalLM:
    """A Qwen3 of two layers, its weights drawn from a seed of its own."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        initializer_range=initializer_range,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        return Qwen3ForCausalLM(config).to(torch.float32)


def _save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
