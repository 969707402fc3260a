"""A message for the policy to read, as tokens that continue its conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from lineage.trainer.agent_loop.base import AgentLoopError

_ANSWER = "@@answer@@"  # stands for the policy's message: what a template puts after it is the continuation
_QUESTION = {"role": "user", "content": "@@question@@"}


@dataclass(frozen=True)
class Continuation:
    """Tokens to add after the policy's.

    Attributes:
        inserted: what ends the policy's message and was not generated: mostly a line feed.
        observation: the messages, and the head of the policy's next one.
    """

    inserted: list[int]
    observation: list[int]

    def __len__(self) -> int:
        return len(self.inserted) + len(self.observation)


def continuation(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], last_id: int, template_kwargs: Mapping[str, Any]
) -> Continuation:
    """Tokens of messages that follow the policy's, by the tokenizer's chat template.

    A template without the role ``tool`` is given a user's message with ``<tool_response>`` around the text.

    Args:
        messages: tool or user messages, ``role`` and ``content``.
        last_id: the policy's last token; what it has said of the message's end is not said again.

    Raises:
        AgentLoopError: the template shows neither form.
    """
    text = _follow(tokenizer, messages, template_kwargs)
    if text is None:
        text = _follow(tokenizer, [_as_user(message) for message in messages], template_kwargs)
    if text is None:
        raise AgentLoopError(
            "the tokenizer's chat template shows neither a tool message nor a user message after an answer: "
            "agent_name=tool_agent needs one that does"
        )
    end = tokenizer.eos_token or ""
    border = len(end) if end and text.startswith(end) else 0
    border += len(text[border:]) - len(text[border:].lstrip())
    said = tokenizer.decode([last_id])
    begin = len(said) if said == end and text.startswith(end) else 0
    return Continuation(_encode(tokenizer, text[begin:border]), _encode(tokenizer, text[border:]))


def _follow(tokenizer: Any, messages: Sequence[Mapping[str, str]], template_kwargs: Mapping[str, Any]) -> str | None:
    """What the template writes after an answer that these messages follow; None where it does not show them."""
    conversation = [_QUESTION, {"role": "assistant", "content": _ANSWER}, *messages]
    try:
        text = tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, tokenize=False, **template_kwargs
        )
    except TemplateError:
        return None
    _, found, after = text.partition(_ANSWER)
    shown = bool(found) and all(message["content"].strip() in after for message in messages)
    return after if shown else None


def _as_user(message: Mapping[str, str]) -> dict[str, str]:
    content = message["content"]
    if message["role"] == "tool":
        content = f"<tool_response>\n{content}\n</tool_response>"
    return {"role": "user", "content": content}


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False)) if text else []
