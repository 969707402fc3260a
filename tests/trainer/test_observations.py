"""Observations: what a chat template writes after the policy's answer, and nothing the policy has written."""

from __future__ import annotations

import pytest
from jinja2 import TemplateError

from lineage.trainer.agent_loop import (
    AgentLoopError,
)
from lineage.trainer.agent_loop.observations import continuation


class Template:
    """A tokenizer of characters with a chat template of the test's."""

    eos_token = "$"

    def __init__(self, write):
        self.write = write

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        return self.write(messages)

    def encode(self, text, add_special_tokens):
        return [ord(letter) for letter in text]

    def decode(self, ids):
        return "".join(map(chr, ids))


def plain(messages, roles=("user", "assistant", "tool")):
    """Role, text and an end for each message of a known role."""
    return "".join(f"{m['role']}:{m['content']}$\n" for m in messages if m["role"] in roles) + "assistant:"


def strict(messages):
    """A template that refuses a role it does not know."""
    if any(message["role"] == "tool" for message in messages):
        raise TemplateError("Only user and assistant roles are supported!")
    return plain(messages)


def texts(write, last, *messages):
    """Inserted and observed text after a policy's last character."""
    tokenizer = Template(write)
    made = continuation(tokenizer, messages, ord(last), {})
    return tokenizer.decode(made.inserted), tokenizer.decode(made.observation)


TOOL = {"role": "tool", "content": "7"}


def test_what_the_policy_ended_is_not_ended_again():
    """The message's end is inserted only where the policy's last token is not it."""
    assert texts(plain, "$", TOOL) == ("\n", "tool:7$\nassistant:")
    assert texts(plain, "x", TOOL) == ("$\n", "tool:7$\nassistant:")


@pytest.mark.parametrize("write", [strict, lambda messages: plain(messages, ("user", "assistant"))])
def test_a_template_without_tools_is_given_a_user_message(write):
    """A template that refuses the role, or leaves it out, shows the text between delimiters."""
    said = "user:<tool_response>\n7\n</tool_response>$\nassistant:"
    assert texts(write, "$", TOOL) == ("\n", said)


@pytest.mark.parametrize("said", ["", "a", ":", "user"])
def test_what_a_tool_says_does_not_choose_its_form(said):
    """Text that the template writes anyway, or none, is no proof that it shows tools."""
    write = lambda messages: plain(messages, ("user", "assistant"))  # noqa: E731
    shown = f"user:<tool_response>\n{said}\n</tool_response>$\nassistant:"
    assert texts(write, "$", {"role": "tool", "content": said}) == ("\n", shown)


def test_a_template_may_write_a_tools_text_otherwise():
    """A template with tools that escapes a text is still one with tools; it is asked so once, not at every message."""
    written = []

    def escaping(messages):
        written.append(messages[-1]["content"])
        return plain([{**message, "content": message["content"].replace('"', '\\"')} for message in messages])

    tokenizer = Template(escaping)
    observed = [continuation(tokenizer, [{"role": "tool", "content": said}], ord("$"), {}) for said in ('"7"', "8")]
    assert tokenizer.decode(observed[0].observation) == 'tool:\\"7\\"$\nassistant:'
    assert written[-2:] == ['"7"', "8"]


def test_a_template_that_shows_neither_is_refused():
    """Without a form for an observation there is no tool loop."""
    with pytest.raises(AgentLoopError, match="chat template shows neither"):
        texts(lambda messages: "assistant:", "$", TOOL)


def test_a_template_may_write_an_earlier_answer_otherwise():
    """What a template adds to the last answer only is not taken for a part of the continuation."""

    def thinking(messages):
        last = len(messages) - 1
        return "".join(
            f"{m['role']}:{'<think>' if m['role'] == 'assistant' and n == last else ''}{m['content']}$\n"
            for n, m in enumerate(messages)
        )

    assert texts(thinking, "$", TOOL) == ("\n", "tool:7$\n")
