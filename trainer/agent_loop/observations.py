"""A message for the policy to read, as tokens that continue its conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from jinja2 import TemplateError

from lineage.trainer.agent_loop.base import AgentLoopError

_ANSWER = "@@answer@@"  # stands for the policy's message: what a template puts after it is the continuation
_QUESTION = {"role": "user", "content": "@@question@@"}
_PROBE = "@@probe@@"  # stands for a message that follows

# by tokenizer and template: the role each role's messages are shown as
_known_forms: WeakKeyDictionary[Any, dict[str, Mapping[str, str]]] = WeakKeyDictionary()


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
    forms = _forms(tokenizer, template_kwargs)
    shown = [_shaped(message, forms[message["role"]]) for message in messages if message["role"] in forms]
    text = _follow(tokenizer, shown, template_kwargs) if len(shown) == len(messages) else None
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


def _forms(tokenizer: Any, template_kwargs: Mapping[str, Any]) -> Mapping[str, str]:
    """The role as which the template shows a message of each role; one it cannot show is left out.

    Found out once for a template, of a probe word: nothing that a tool says may decide it.
    """
    known = _known_forms.setdefault(tokenizer, {})
    template = repr((getattr(tokenizer, "chat_template", None), template_kwargs))
    if template not in known:
        forms = {role: role for role in ("user", "tool") if _shows(tokenizer, role, template_kwargs)}
        known[template] = {"tool": "user", **forms} if "user" in forms else forms
    return known[template]


def _shows(tokenizer: Any, role: str, template_kwargs: Mapping[str, Any]) -> bool:
    after = _follow(tokenizer, [{"role": role, "content": _PROBE}], template_kwargs)
    return after is not None and _PROBE in after


def _follow(tokenizer: Any, messages: Sequence[Mapping[str, str]], template_kwargs: Mapping[str, Any]) -> str | None:
    """What the template writes after an answer that these messages follow; None where it refuses them."""
    conversation = [_QUESTION, {"role": "assistant", "content": _ANSWER}, *messages]
    try:
        text = tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, tokenize=False, **template_kwargs
        )
    except TemplateError:
        return None
    _, found, after = text.partition(_ANSWER)
    return after if found else None


def _shaped(message: Mapping[str, str], form: str) -> Mapping[str, str]:
    """A message as the template shows it: a tool's between delimiters where it has to be a user's."""
    if form == message["role"]:
        return message
    return {"role": form, "content": f"<tool_response>\n{message['content']}\n</tool_response>"}


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False)) if text else []
