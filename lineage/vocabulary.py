"""The words of a trace: stages, ops, entities, spans and the registry of fields.

The names are verl's. A field the registry does not know is legal: it is recorded with the span its shape suggests.
"""

from __future__ import annotations

from dataclasses import dataclass

# In the order of one synchronous step: prompts are submitted, sessions run and are scored inside the agent loop,
# the checkpoint is saved before the weights go to the rollout, and clear comes last.
STAGES: tuple[str, ...] = (
    "init",
    "dataset",
    "prompt",
    "rollout",
    "reward",
    "sample",
    "balance",
    "old_log_prob",
    "ref_log_prob",
    "values",
    "advantage",
    "update_actor",
    "checkpoint",
    "weight_sync",
    "validate",
    "metrics",
    "dump",
    "clear",
)

OPS: tuple[str, ...] = (
    "produce",
    "consume",
    "compare",
    "tag",
    "filter",
    "reorder",
    "pad",
    "unpad",
    "split",
    "concat",
    "dispatch",
    "generate",
    "score",
    "forward",
    "optim_step",
    "sync",
    "sleep",
    "wake",
    "cache_reset",
    "clear",
)

ENTITIES: tuple[str, ...] = ("trajectory", "prompt", "turn", "request", "dataset_row", "param", "metric")
SPANS: tuple[str, ...] = ("prompt", "response", "sequence", "scalar")
CONTAINERS: tuple[str, ...] = ("TensorDict", "DataProto", "KVBatchMeta", "BatchMeta", "dict", "list")
LAYOUTS: tuple[str, ...] = ("dense", "jagged", "object", "scalar")

STATUSES: tuple[str, ...] = ("pending", "running", "finished", "failure")
TERMINAL_STATUSES: tuple[str, ...] = ("finished", "failure")


@dataclass(frozen=True)
class Field:
    """One named field of a batch.

    Attributes:
        name: field name, as verl spells it.
        span: tokens it covers: prompt, response, sequence or scalar.
        produced_in: stage that makes it in the reference step.
        consumed_in: stages that may read it.
        role: what the field is for.
    """

    name: str
    span: str
    produced_in: str
    consumed_in: tuple[str, ...]
    role: str


_FORWARD = ("old_log_prob", "ref_log_prob", "update_actor")

_FIELDS: tuple[Field, ...] = (
    Field("raw_prompt", "scalar", "dataset", ("rollout",), "message list, before the chat template"),
    Field("data_source", "scalar", "dataset", ("reward", "metrics"), "dataset the row came from"),
    Field("reward_model", "scalar", "dataset", ("reward",), "ground truth and scoring style"),
    Field("extra_info", "scalar", "dataset", ("rollout", "reward"), "index, tools_kwargs, interaction_kwargs"),
    Field("index", "scalar", "dataset", ("rollout",), "dataset row number"),
    Field("dummy_tensor", "scalar", "dataset", ("prompt",), "placeholder tensor of DataProto.batch"),
    Field("multi_modal_inputs", "scalar", "rollout", _FORWARD, "opaque image, video or audio inputs"),
    Field("uid", "scalar", "prompt", ("rollout", "advantage"), "prompt group"),
    Field("prompts", "prompt", "rollout", ("old_log_prob", "metrics"), "prompt token ids"),
    Field("responses", "response", "rollout", (*_FORWARD, "reward", "metrics"), "response token ids"),
    Field("response_mask", "response", "rollout", (*_FORWARD, "advantage", "metrics"), "1 on policy tokens"),
    Field("loss_mask", "response", "rollout", ("update_actor",), "alias of response_mask"),
    Field("input_ids", "sequence", "rollout", _FORWARD, "prompts ++ responses"),
    Field("attention_mask", "sequence", "rollout", _FORWARD, "1 on tokens, 0 on padding"),
    Field("position_ids", "sequence", "rollout", _FORWARD, "position of each token"),
    Field("rm_scores", "response", "reward", ("sample", "advantage", "metrics"), "score on the last response token"),
    Field("rollout_log_probs", "response", "rollout", ("old_log_prob", "advantage"), "log-probs of the sampler"),
    Field("likelier", "response", "rollout", (), "tokens likelier than the drawn one, where not all can be drawn"),
    Field("likelier_mass", "response", "rollout", (), "probability of those together, where there is a nucleus"),
    Field("log_probs", "sequence", "old_log_prob", ("old_log_prob", "ref_log_prob"), "worker's log-probs"),
    Field("old_log_probs", "response", "old_log_prob", ("advantage", "update_actor"), "proximal anchor of the ratio"),
    Field("entropy", "response", "old_log_prob", ("metrics",), "entropy of the policy"),
    Field("ref_log_prob", "response", "ref_log_prob", ("advantage", "update_actor"), "reference policy's log-probs"),
    Field("token_level_scores", "response", "advantage", ("advantage",), "rm_scores as the estimator sees them"),
    Field(
        "token_level_rewards", "response", "advantage", ("advantage", "metrics"), "scores, less the KL if it is there"
    ),
    Field("rollout_is_weights", "response", "advantage", ("update_actor",), "importance weights on the loss"),
    Field("values", "response", "values", ("advantage",), "critic values"),
    Field("advantages", "response", "advantage", ("update_actor", "metrics"), "weights of the policy gradient"),
    Field("returns", "response", "advantage", ("metrics",), "returns"),
    Field("pg_loss", "response", "update_actor", (), "policy loss of each token, before its mask"),
    Field("entropy_loss", "response", "update_actor", (), "entropy of each token's distribution, before its mask"),
    Field("kl_loss", "response", "update_actor", (), "KL estimate of each token, before its mask"),
    Field("turns", "sequence", "rollout", (), "tokens of one turn of a trajectory (entity turn)"),
    Field("num_turns", "scalar", "rollout", ("metrics",), "turns of the session"),
    Field("extra_fields", "scalar", "rollout", ("sample", "metrics"), "AgentLoopOutput.extra_fields"),
    Field("prompt_len", "scalar", "rollout", (), "tag: prompt tokens"),
    Field("response_len", "scalar", "rollout", (), "tag: response container length"),
    Field("seq_len", "scalar", "rollout", ("balance",), "tag: prompt_len + response_len"),
    Field("dump", "scalar", "dump", (), "score of a dumped line, under the key it was written with"),
)

FIELDS: dict[str, Field] = {field.name: field for field in _FIELDS}


# Names verl uses twice: a worker writes them over the whole sequence, the driver cuts them to the response.
TWO_SPANS: frozenset[str] = frozenset({"log_probs", "entropy"})


def span_of(field: str) -> str | None:
    """Span of a known field, or None: the caller then decides from the shape."""
    known = FIELDS.get(field)
    return known.span if known else None
