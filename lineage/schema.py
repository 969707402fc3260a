"""Schema v1: what one row of a trace says.

One row is one (run, step, stage, op, field, process, mini/micro-batch). Its scalars say what the field was; its
list columns, all of length ``n`` (0 is legal), say it per element. :data:`COLUMNS` is the single source: the Arrow
schema, the reference page (``docs/schema.md``) and the views are made from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pyarrow as pa

SCHEMA_VERSION = 1

# Parquet key-value metadata keys. Each value is JSON, but for the version, which is a decimal string.
META_VERSION = b"lineage.schema_version"
META_RUN = b"lineage.run"  # run_id, profile, versions, seed, hashes of model, tokenizer and config, git revision
META_CONFIG = b"lineage.config"  # the resolved configuration
META_STATE = b"lineage.state"  # closed, steps sealed, steps torn, what was dropped and why
META_SEGMENT = b"lineage.segment"  # number, of, plan: only in the files of a trace that takes several

COORD = pa.struct([(axis, pa.int32()) for axis in ("dp", "sp", "tp", "pp", "cp", "ep")])
PARENT = pa.struct([("process", pa.string()), ("seq", pa.int64())])
MARK = pa.struct([("at", pa.int32()), ("fp", pa.uint64())])
WEIGHTS = pa.struct(
    [
        ("version", pa.int64()),
        ("phase", pa.string()),
        ("cache_epoch", pa.int64()),
        ("adapter", pa.string()),
        ("training", pa.bool_()),
    ]
)
SAMPLING = pa.struct(
    [
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("top_k", pa.int32()),
        ("min_p", pa.float64()),
        ("repetition_penalty", pa.float64()),
        ("do_sample", pa.bool_()),
        ("seed", pa.int64()),
        ("logprobs_mode", pa.string()),
    ]
)
LOSS = pa.struct(
    [
        ("term", pa.string()),
        ("mode", pa.string()),
        ("numerator", pa.float64()),
        ("denominator", pa.float64()),
        ("scale", pa.float64()),
        ("rows", pa.int64()),
        ("tokens", pa.int64()),
    ]
)
OPTIM = pa.struct([("lr", pa.float64()), ("grad_norm", pa.float64()), ("clip", pa.float64()), ("skipped", pa.bool_())])
TOPOLOGY = pa.struct(
    [
        ("backend", pa.string()),
        ("world_size", pa.int32()),
        ("reported_dp", pa.int32()),
        ("fsdp_size", pa.int32()),
        ("sp", pa.int32()),
        ("tp", pa.int32()),
        ("pp", pa.int32()),
        ("cp", pa.int32()),
        ("ep", pa.int32()),
        ("dynamic_cp", pa.bool_()),
        ("rollout_tp", pa.int32()),
        ("rollout_dp", pa.int32()),
    ]
)
RESIDENT = pa.struct([("prompts", pa.int64()), ("trajectories", pa.int64()), ("bytes", pa.int64())])


@dataclass(frozen=True)
class Column:
    """One column of the trace.

    Attributes:
        name: column name, the field's own word for it.
        type: Arrow type of the column, or of one element for a list column.
        meaning: what it says, in one sentence.
        unit: unit or set of values; empty when the type says it.
        null: what a null means; empty when it is never null.
        listed: true when the column holds one value per element of the row.
    """

    name: str
    type: pa.DataType
    meaning: str
    unit: str = ""
    null: str = ""
    listed: bool = False

    @property
    def arrow_type(self) -> pa.DataType:
        """Type of the stored column: the list type for a listed column."""
        return pa.list_(self.type) if self.listed else self.type


def _scalar(name: str, type_: pa.DataType, meaning: str, unit: str = "", null: str = "") -> Column:
    return Column(name, type_, meaning, unit, null)


def _listed(name: str, type_: pa.DataType, meaning: str, unit: str = "", null: str = "not known") -> Column:
    return Column(name, type_, meaning, unit, null, listed=True)


_S, _B = pa.string(), pa.bool_()
_I32, _I64, _U64, _F64 = pa.int32(), pa.int64(), pa.uint64(), pa.float64()

WHO_WHEN = (
    _scalar("run_id", _S, "the run this row belongs to"),
    _scalar("seq", _I64, "event number, rising within one process"),
    _scalar("process", _S, "who wrote the row", "driver, actor:0, rollout:1 ..."),
    _scalar("rank", _I32, "global rank of the process", null="not a ranked process"),
    _scalar("coord", COORD, "position of the rank in each parallel dimension", null="not a ranked process"),
    _scalar("time_ns", _I64, "wall clock when the event began", "ns since 1970"),
    _scalar("parent", PARENT, "the event whose content this one read", null="not known"),
)
WHERE = (
    _scalar("global_steps", _I64, "training step, counted from 1; 0 is before the first", "steps"),
    _scalar("stage", _S, "stage of the step", "vocabulary.STAGES"),
    _scalar("op", _S, "what happened to the field", "vocabulary.OPS"),
    _scalar("partition", _S, "queue partition the data belongs to", "train, val ...", "not of a partition"),
    _scalar("ppo_epoch", _I32, "PPO epoch over the batch, from 0", null="outside the actor update"),
    _scalar("update_index", _I32, "optimiser step within the run step, from 0", null="outside the actor update"),
    _scalar("mini_batch", _I32, "mini-batch within the epoch, from 0", null="not of a mini-batch"),
    _scalar("micro_batch", _I32, "micro-batch within the mini-batch, from 0", null="not of a micro-batch"),
)
WHAT = (
    _scalar("entity", _S, "what one element of the lists is", "vocabulary.ENTITIES"),
    _scalar("field", _S, "the named column of the batch", "vocabulary.FIELDS or the user's own"),
    _scalar("against", _S, "the other side of a comparison", null="op is not compare"),
    _scalar("producer", _S, "component that made the content", null="not known"),
    _scalar("consumer", _S, "component that reads the content", null="not declared"),
    _scalar("container", _S, "what held the field", "TensorDict, DataProto, KVBatchMeta, dict ...", "an event"),
    _scalar("layout", _S, "how the rows lie in memory", "dense, jagged, object, scalar", "no content seen"),
    _scalar("span", _S, "which tokens the field covers", "vocabulary.SPANS", "no content seen"),
    _scalar("dtype", _S, "element type as its framework names it", "int64, float32, object ...", "no content seen"),
    _scalar("device", _S, "device of the storage", "cpu, cuda:0 ...", "not a tensor"),
    _scalar("shape", pa.list_(_I64), "shape of the container; -1 on a ragged axis", "elements", "no content seen"),
    _scalar("nbytes", _I64, "size of the content", "bytes", "no content seen"),
    _scalar("requires_grad", _B, "the tensor carries a gradient", null="not a tensor"),
    _scalar("n", _I32, "number of elements: the length of every listed column that is not null", "elements"),
)
IDENTITY = (
    _listed("key", _S, "trajectory key, uid, parameter, metric or dataset index, by entity", null="no keys"),
    _listed("slot", _I64, "global index of the key in the queue", null="did not pass through a queue"),
    _listed("is_padding", _B, "the row was added to make the batch divide"),
    _listed("global_steps_tag", _I64, "tag: the step that submitted the prompt", "steps"),
    _listed("min_global_steps", _I64, "tag: oldest weight version that generated a token", "weight version"),
    _listed("max_global_steps", _I64, "tag: newest weight version that generated a token", "weight version"),
    _listed("status", _S, "state of the group or trajectory", "pending, running, finished, failure, success"),
    _listed("finish_reason", _S, "why generation ended", "stop, length, tool, abort, error"),
    _listed("reason", _S, "why the element left or was masked", "filtered, failed, rejected, truncated_masked"),
    _listed("num_turns", _I32, "turns of the conversation", "turns"),
    _listed("expected", _I32, "sessions declared for the prompt", "sessions"),
    _listed("source_index", _I64, "position before this event (op reorder), or dataset row of the prompt", "rows"),
    _listed("data_source", _S, "dataset the prompt came from"),
    _listed("turn", _I32, "turn number within the session", "turns", "entity is not turn"),
    _listed("start", _I32, "first token of the turn within the sequence", "tokens", "entity is not turn"),
    _listed("role", _S, "whose tokens the turn holds", "prompt, policy, observation, inserted", "entity is not turn"),
    _listed("generated", _I32, "tokens the engine reports as generated", "tokens"),
    _listed("truncated_from", _I32, "length before a declared cut", "tokens", "not cut"),
    _listed("trimmed", _I32, "tokens a declared trim removed", "tokens", "not trimmed"),
)
CONTENT = (
    _listed("length", _I64, "container length of the element, padding included", "elements"),
    _listed("valid_length", _I64, "elements that are data: length without the padding", "elements"),
    _listed("mask_sum", _I64, "elements under the mask", "elements", "no mask beside the field"),
    _listed("fingerprint", _U64, "order-aware content hash of the valid elements"),
    _listed("mask_fingerprint", _U64, "the same hash of int64(mask != 0)", null="no mask beside the field"),
    _listed("marks", pa.list_(MARK), "prefix fingerprints at the borders of prompt, response and turns"),
    _listed("sum", _F64, "sum over the container", null="strings, objects and weights"),
    _listed("first", _F64, "first element of the container", null="empty"),
    _listed("last", _F64, "last element of the container", null="empty"),
    _listed("last_nnz", _I64, "position of the last element that is not zero", "elements", "all are zero"),
    _listed("nnz", _I64, "elements that are not zero, over the container", "elements"),
    _listed("sum_in", _F64, "sum under the mask (over the valid elements where there is none)"),
    _listed("min_in", _F64, "least element under the mask", null="nothing under the mask"),
    _listed("max_in", _F64, "greatest element under the mask", null="nothing under the mask"),
    _listed("sum_sq_in", _F64, "sum of squares under the mask"),
    _listed("nnz_out", _I64, "elements outside the mask that are not zero", "elements", "no mask"),
    _listed("max_abs_out", _F64, "greatest magnitude outside the mask", null="no mask, or nothing outside it"),
    _listed("nonfinite", _I64, "NaN and infinite elements of the container", "elements"),
    _listed("nonfinite_in", _I64, "NaN and infinite elements under the mask", "elements"),
)
PAIRS = (
    _listed("absdiff_sum", _F64, "sum of absolute differences under the mask", null="op is not compare"),
    _listed("absdiff_max", _F64, "greatest absolute difference under the mask", null="op is not compare, or none"),
    _listed("corr0", _F64, "correlation of the two sides", null="op is not compare, or constant"),
    _listed("corr_prev", _F64, "correlation with the other side one token earlier", null="as corr0"),
    _listed("corr_next", _F64, "correlation with the other side one token later", null="as corr0"),
    _listed("n_equal", _I64, "tokens equal bit for bit", "tokens", "op is not compare"),
    _listed("n_in", _I64, "tokens compared", "tokens", "op is not compare"),
)
ASKED = (
    _scalar("asked_n", _I32, "keys asked of the queue", "keys", "not a get"),
    _scalar("missing", pa.list_(_S), "keys asked for and not returned", null="not a get"),
)
CONTEXT = (
    _scalar("weights", WEIGHTS, "which weights were used, sent or received", "phase: actor, engine, ref", "no weights"),
    _scalar("sampling", SAMPLING, "how tokens were drawn", null="nothing was sampled"),
    _scalar("loss", LOSS, "one term of the loss on one micro-batch", null="not a loss row"),
    _scalar("optim", OPTIM, "one optimiser step", null="not an optimiser step"),
    _scalar("topology", TOPOLOGY, "parallel layout as the backend reports it", null="not recorded here"),
    _scalar("resident", RESIDENT, "what the queue still holds", null="not measured here"),
    _scalar("attrs", pa.map_(_S, _S), "batch extra_info and the like", null="none"),
)

COLUMNS: tuple[Column, ...] = (*WHO_WHEN, *WHERE, *WHAT, *IDENTITY, *CONTENT, *PAIRS, *ASKED, *CONTEXT)
SCALARS: tuple[Column, ...] = tuple(column for column in COLUMNS if not column.listed)
LISTED: tuple[Column, ...] = tuple(column for column in COLUMNS if column.listed)


@cache
def schema() -> pa.Schema:
    """The Arrow schema of a trace: every column nullable, with meaning, unit and null as field metadata."""
    return pa.schema(
        [
            pa.field(
                column.name,
                column.arrow_type,
                metadata={"meaning": column.meaning, "unit": column.unit, "null": column.null or "never"},
            )
            for column in COLUMNS
        ],
        metadata={META_VERSION: str(SCHEMA_VERSION).encode()},
    )
