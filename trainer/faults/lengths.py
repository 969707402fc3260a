"""Faults of lengths and shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from lineage.trainer.faults.registry import Seams, fault
from lineage.trainer.faults.seams import TRAJECTORY_FIELDS, tiny_tokenizer
from lineage.trainer.protocol import KVBatchMeta, nested_from_list
from lineage.trainer.training import rows_of


def _even(original: Any, queue: Any, batch: KVBatchMeta, names: list[str]) -> TensorDict:
    """What a careless reader does: rows of log-probs are cut or filled to the length of their mask."""
    data = original(queue, batch, names)
    if "rollout_log_probs" in names:
        pairs = zip(rows_of(data["rollout_log_probs"]), rows_of(data["response_mask"]), strict=True)
        padded = [torch.nn.functional.pad(row, (0, len(mask) - len(row))) for row, mask in pairs]
        data["rollout_log_probs"] = nested_from_list(padded)
    return data


def _written_and_evened(write: Callable[..., TensorDict]) -> Seams:
    readers = ("lineage.trainer.stages.log_prob.fetch", "lineage.trainer.stages.advantage.fetch")
    return {TRAJECTORY_FIELDS: write, **dict.fromkeys(readers, _even)}


@fault("LEN001", "old_log_prob")
def entropy_cut_too_long() -> Seams:
    """The entropy is cut with the position that predicts what follows the response: one value more than tokens."""

    def write(original: Any, parts: Any, batch: Any, columns: dict[str, Any]) -> None:
        if "entropy" in columns:
            rows = [torch.nn.functional.pad(row, (0, 1)) for row in rows_of(columns["entropy"])]
            columns = {**columns, "entropy": nested_from_list(rows)}
        original(parts, batch, columns)

    return {"lineage.trainer.stages.log_prob.put": write}


@fault("LEN001", "rollout")
def short_log_probs() -> Seams:
    """The engine returns the log-probs of all tokens but the last; whoever reads them pads, so nothing crashes."""

    def write(original: Any, *args: Any) -> TensorDict:
        fields = original(*args)
        fields["rollout_log_probs"] = nested_from_list([row[:-1] for row in rows_of(fields["rollout_log_probs"])])
        return fields

    return _written_and_evened(write)


@fault("LEN001", "rollout", "+experiment=multi_output", reports=["slime-multi-agent-missing-logprobs"])
def drafts_without_log_probs() -> Seams:
    """A session of several outputs keeps the engine's log-probs of its last one; those of the drafts are empty."""

    def write(original: Any, uid: str, results: Any, *rest: Any) -> TensorDict:
        fields = original(uid, results, *rest)
        last = [one is result.outputs[-1] for result in results for one in result.outputs]
        pairs = zip(rows_of(fields["rollout_log_probs"]), last, strict=True)
        fields["rollout_log_probs"] = nested_from_list([row if final else row[:0] for row, final in pairs])
        return fields

    return _written_and_evened(write)


@fault("LEN001", "rollout", reports=["slime-retry-keeps-stale-state"])
def log_probs_of_two_attempts() -> Seams:
    """A session was tried twice and its list of log-probs was not emptied: those of the first attempt come first."""

    def write(original: Any, *args: Any) -> TensorDict:
        fields = original(*args)
        first, *others = rows_of(fields["rollout_log_probs"])
        fields["rollout_log_probs"] = nested_from_list([torch.cat([first[:3], first]), *others])
        return fields

    return _written_and_evened(write)


@fault("LEN001", "rollout", reports=["trl-tool-mask-longer-than-ids", "verifiers-mask-vs-ids-length"])
def mask_of_the_engines_tokens() -> Seams:
    """The ids come from text that was encoded again, without its end token; mask and log-probs count the engine's."""

    def check(original: Any, outputs: Any, *args: Any) -> Any:
        eos = tiny_tokenizer().eos_token_id
        checked = original(outputs, *args)
        return [
            replace(one, response_ids=one.response_ids[:-1])
            if one.response_ids[-1] == eos and len(one.response_ids) > 1
            else one
            for one in checked
        ]

    return {"lineage.trainer.agent_loop.worker.check_outputs": check}


@fault("LEN002", "rollout")
def truncated_input_ids() -> Seams:
    """The sequence is cut to a model length one token short, after prompt and response were written whole."""

    def write(original: Any, *args: Any) -> TensorDict:
        fields = original(*args)
        limit = max(len(row) for row in rows_of(fields["input_ids"])) - 1
        for name in ("input_ids", "attention_mask", "position_ids"):
            fields[name] = nested_from_list([row[:limit] for row in rows_of(fields[name])])
        return fields

    return {TRAJECTORY_FIELDS: write}


@fault("LEN002", "rollout", reports=["slime-first-turn-tokens-without-prompt"])
def sequence_without_its_prompt() -> Seams:
    """The sequence was begun with the first tokens the engine returned: of the prompt only its last token is there."""

    def write(original: Any, *args: Any) -> TensorDict:
        fields = original(*args)
        kept = [len(row) + 1 for row in rows_of(fields["responses"])]
        for name in ("input_ids", "attention_mask", "position_ids"):
            rows = zip(rows_of(fields[name]), kept, strict=True)
            fields[name] = nested_from_list(
                [row[:size] if name == "position_ids" else row[-size:] for row, size in rows]
            )
        return fields

    return {TRAJECTORY_FIELDS: write}


@fault("LEN002", "rollout")
def tags_without_the_end() -> Seams:
    """The lengths in the tags are counted on the decoded answer: the token that ends it is in the tensors alone."""

    def tag(original: Any, output: Any, *args: Any) -> dict[str, Any]:
        made = original(output, *args)
        ended = int(output.extra_fields["finish_reason"] == "stop")
        return {**made, "response_len": made["response_len"] - ended, "seq_len": made["seq_len"] - ended}

    return {"lineage.trainer.agent_loop.worker.trajectory_tag": tag}


@fault("LEN003", "advantage")
def padding_loses_the_last_value() -> Seams:
    """The padded container is filled up to width - 1, a slice meant for shifted logits: the longest rows lose their
    last value, the reward among them."""

    def pad(original: Any, nested: Tensor, **options: Any) -> Tensor:
        padded = original(nested, **options)
        padded[:, -1] = 0
        return padded

    return {"lineage.trainer.protocol.nested_to_padded": pad}


@fault("LEN007", "rollout", "data.train_batch_size=4")
def scores_in_double() -> Seams:
    """A scorer returned a numpy number: the scores of a step are float64, and so is what is made of them."""

    def write(original: Any, *args: Any) -> TensorDict:
        fields = original(*args)
        fields["rm_scores"] = fields["rm_scores"].double()
        return fields

    return {TRAJECTORY_FIELDS: write}


@fault("LEN007", "rollout")
def equal_rows_go_dense() -> Seams:
    """Rows of one length are stacked instead of kept apart: where a whole group reached the limit, its log-probs are
    one dense tensor."""

    def write(original: Any, *args: Any) -> TensorDict:
        fields = original(*args)
        rows = rows_of(fields["rollout_log_probs"])
        if len({len(row) for row in rows}) == 1:
            fields["rollout_log_probs"] = torch.stack(rows)
        return fields

    return {TRAJECTORY_FIELDS: write}
