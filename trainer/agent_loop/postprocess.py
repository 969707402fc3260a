"""From the outputs of a group's sessions to rows of the queue (verl ``_agent_loop_postprocess``)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from tensordict import NonTensorStack, TensorDict

from lineage.hooks import first_line
from lineage.trainer.agent_loop.base import AgentLoopOutput, SessionError
from lineage.trainer.protocol import nested_from_list, nested_tokens_last

Number = TypeVar("Number", int, float)

# fields of the dataset row that stay with the trajectory
CARRIED = ("raw_prompt", "data_source", "reward_model")
# and those a rule needs that judges it after it was sampled (``reward.reward_model.enable``)
CARRIED_UNSCORED = (*CARRIED, "extra_info")


@dataclass(frozen=True)
class SessionResult:
    """A session that succeeded.

    Attributes:
        outputs: what its loop returned, at least one.
        score: reward of the session, carried by each of its outputs; None when nothing scored it.
    """

    session_id: int
    outputs: list[AgentLoopOutput]
    score: float | None


def check_outputs(outputs: Sequence[AgentLoopOutput], vocab_size: int | None = None) -> list[AgentLoopOutput]:
    """The outputs of a session with lists of numbers, whatever sequences the loop gave: tuples, arrays, tensors.

    Args:
        vocab_size: of the model: its ids lie below; None does not look.

    Raises:
        SessionError: no trajectory can be made of them: no output, an empty prompt or response, parts of different
            lengths, something that is no number, or a token the model does not have.
    """
    if not outputs:
        raise SessionError("the agent loop returned no output")
    checked = []
    for index, given in enumerate(outputs):
        if not isinstance(given, AgentLoopOutput):
            raise SessionError(f"output {index} is a {type(given).__name__}, an AgentLoopOutput is needed")
        log_probs = given.response_logprobs
        output = replace(
            given,
            prompt_ids=_numbers(given.prompt_ids, int, f"output {index}: prompt_ids"),
            response_ids=_numbers(given.response_ids, int, f"output {index}: response_ids"),
            response_mask=_numbers(given.response_mask, int, f"output {index}: response_mask"),
            response_logprobs=None if log_probs is None else _numbers(log_probs, float, f"output {index}: log-probs"),
        )
        size = len(output.response_ids)
        if not output.prompt_ids or not size:
            raise SessionError(f"output {index} has {len(output.prompt_ids)} prompt and {size} response tokens")
        if vocab_size is not None and not _in_vocabulary(output, vocab_size):
            raise SessionError(f"output {index}: a token id outside the model's vocabulary of {vocab_size}")
        if len(output.response_mask) != size:
            raise SessionError(f"output {index}: {size} response tokens, a mask of {len(output.response_mask)}")
        if output.response_logprobs is not None and len(output.response_logprobs) != size:
            raise SessionError(f"output {index}: {size} tokens, {len(output.response_logprobs)} log-probs")
        if not all(map(math.isfinite, output.response_logprobs or ())):
            raise SessionError(f"output {index}: a log-prob that is no finite number")
        checked.append(output)
    return checked


def _in_vocabulary(output: AgentLoopOutput, vocab_size: int) -> bool:
    ids = (*output.prompt_ids, *output.response_ids)
    return min(ids) >= 0 and max(ids) < vocab_size


def _numbers(values: Any, kind: type[Number], what: str) -> list[Number]:
    """Values as a list of plain numbers.

    Raises:
        SessionError: one is no number, or no whole one where these are needed.
    """
    try:
        given = values.tolist() if hasattr(values, "tolist") else list(values)
        numbers = [kind(value) for value in given]
        fits = kind is float or numbers == given
    except (TypeError, ValueError, OverflowError) as error:
        raise SessionError(f"{what}: {first_line(error)}") from error
    if not fits:
        raise SessionError(f"{what} are no whole numbers")
    return numbers


def trajectory_fields(
    uid: str, results: Sequence[SessionResult], row: Mapping[str, Any], carried: Sequence[str] = CARRIED
) -> TensorDict:
    """Queue fields of a group's outputs, one row an output.

    ``prompts responses response_mask loss_mask input_ids attention_mask position_ids`` are jagged int64, the last
    ``(seq)`` or ``(k, seq)`` a row, as the loop gave them. ``rm_scores`` (the session's score on the last response
    token) and ``rollout_log_probs`` are jagged float32, the rest objects. ``loss_mask`` is ``response_mask`` under
    another name; it is the mask of the actor's loss.

    Args:
        row: the dataset row.
        carried: fields of it that stay with each output, where it has them.

    Raises:
        SessionError: some outputs have log-probs or a score and some have none: the queue would drop the field; or
            position_ids do not lie over the sequence, or not alike in every output.
    """
    outputs = [output for result in results for output in result.outputs]
    scores = [result.score for result in results for _ in result.outputs]
    log_probs = [output.response_logprobs for output in outputs]
    prompts = [torch.tensor(output.prompt_ids) for output in outputs]
    responses = [torch.tensor(output.response_ids) for output in outputs]
    masks = nested_from_list([torch.tensor(output.response_mask) for output in outputs])
    sequences = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    fields: dict[str, Any] = {
        "prompts": nested_from_list(prompts),
        "responses": nested_from_list(responses),
        "response_mask": masks,
        "loss_mask": masks,
        "input_ids": nested_from_list(sequences),
        "attention_mask": nested_from_list([torch.ones_like(ids) for ids in sequences]),
        "position_ids": _position_ids(outputs, [len(ids) for ids in sequences]),
    }
    if _all_or_none("response_logprobs", log_probs):
        fields["rollout_log_probs"] = nested_from_list([torch.tensor(values) for values in log_probs])
    if _all_or_none("a score", scores):
        pairs = zip(responses, scores, strict=True)
        fields["rm_scores"] = nested_from_list([_on_last_token(len(ids), float(score or 0.0)) for ids, score in pairs])
    fields["num_turns"] = torch.tensor([output.num_turns for output in outputs])
    fields["uid"] = NonTensorStack(*[uid] * len(outputs))
    fields["extra_fields"] = NonTensorStack(*[_without(output.extra_fields, "position_ids") for output in outputs])
    fields["multi_modal_inputs"] = NonTensorStack(*[dict(output.multi_modal_data) for output in outputs])
    for name in carried:
        if name in row:
            fields[name] = NonTensorStack(*[row[name]] * len(outputs))
    return TensorDict(fields, batch_size=[len(outputs)])


def _position_ids(outputs: Sequence[AgentLoopOutput], lengths: Sequence[int]) -> torch.Tensor:
    """Positions of each sequence: 0, 1, 2, ... or what the loop gave, ``(seq)`` or ``(k, seq)``."""
    rows: list[torch.Tensor] = []
    for output, length in zip(outputs, lengths, strict=True):
        given = output.extra_fields.get("position_ids")
        row = torch.arange(length) if given is None else torch.as_tensor(given, dtype=torch.int64)
        if row.dim() not in (1, 2) or row.shape[-1] != length or row.shape[:-1] != (rows or [row])[0].shape[:-1]:
            raise SessionError(f"position_ids of shape {list(row.shape)} for a sequence of {length} tokens")
        rows.append(row)
    return nested_tokens_last(rows)


def _without(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


def _all_or_none(what: str, values: Sequence[Any]) -> bool:
    """True when every output has it, False when none has."""
    without = sum(value is None for value in values)
    if 0 < without < len(values):
        raise SessionError(f"{without} of {len(values)} outputs have no {what}, the others have it")
    return without == 0


def trajectory_tag(output: AgentLoopOutput, global_steps: int) -> dict[str, Any]:
    """Tag of one output: state, lengths, the step that asked for it and the weight versions that generated it."""
    prompt_len, response_len = len(output.prompt_ids), len(output.response_ids)
    extra = output.extra_fields
    return {
        "status": "success",
        "is_padding": False,
        "prompt_len": prompt_len,
        "response_len": response_len,
        "seq_len": prompt_len + response_len,
        "global_steps": global_steps,
        "min_global_steps": extra.get("min_global_steps"),
        "max_global_steps": extra.get("max_global_steps"),
        "finish_reason": extra.get("finish_reason"),
        "generated": extra.get("generated"),
        "num_turns": output.num_turns,
    }


def _on_last_token(length: int, score: float) -> torch.Tensor:
    scores = torch.zeros(length)
    scores[-1] = score
    return scores
