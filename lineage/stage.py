"""The verbs of a stage: what a loop calls to say that a batch was produced, consumed, compared, reordered, cleared.

A stage collects rows while it is open. Records with the same identity (op, field, mini-batch, ...) are one row, their
elements in the order of the events. A stage opened inside another is one stage however often it is entered, and ends
with the outer one; whoever records into a stage that has ended starts a later row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lineage.batch import column, container_name, frozen_items, padding_of
from lineage.context import LossTerm, Optim, Resident, Weights
from lineage.elements import tag_columns
from lineage.freeze import Frozen, FrozenObjects, FrozenTensor, freeze
from lineage.gather import FEW, kinds_of
from lineage.row import Piece
from lineage.stage_rows import Columns, StageRows, check_rows, guarded, key_tuple
from lineage.statistics.pairs import pair_statistics
from lineage.windows import check_mask, flat_mask, window

if TYPE_CHECKING:
    from lineage.recorder import Recorder

Keys = Sequence[str]


class Stage(StageRows):
    """One open stage of one step. Made by :meth:`lineage.recorder.Recorder.stage`.

    Args:
        recorder: where the rows go.
        name: stage name, one of ``vocabulary.STAGES`` or the user's own.
        producer: component that acts in this stage, e.g. ``ActorRolloutRefWorker.compute_log_prob``.
        consumer: component that reads what the stage produces, if it is known.
        context: context columns that hold for every row of the stage.
    """

    def __init__(
        self, recorder: Recorder, name: str, producer: str | None, consumer: str | None, context: Mapping[str, Any]
    ) -> None:
        super().__init__(recorder, name, producer, consumer, context)
        self.children: dict[Any, Stage] = {}

    @guarded
    def record(
        self,
        op: str,
        batch: Any,
        *,
        keys: Keys | None = None,
        entity: str = "trajectory",
        mask: Any = None,
        columns: Columns | None = None,
        lengths: Mapping[str, Sequence[int]] | None = None,
        left_padded: Sequence[str] = ("prompts",),
        fields: Sequence[str] | None = None,
        **context: Any,
    ) -> None:
        """Record every field of ``batch`` with one op.

        Args:
            op: one of ``vocabulary.OPS``.
            batch: TensorDict, DataProto-shaped object or dict of tensors, arrays and lists, ``n`` rows each.
            keys: ``(n,)`` key of each row; taken from the batch's ``key`` field (``uid`` of prompts) when not given.
            entity: what one row is.
            mask: ``(n, response_len)`` mask the fields are seen under, in their own shape; the batch's
                ``response_mask`` when not given, else the one this stage consumed for the same keys.
            columns: element columns by schema name (``finish_reason``, ``num_turns``, ``source_index`` ...).
            lengths: valid lengths of padded tensors by span; read from ``attention_mask`` when not given.
            left_padded: fields whose padding is on the left.
            fields: record only these.
            context: context columns (``mini_batch``, ``weights``, ``sampling``, ``attrs`` ...).
        """
        context["container"] = context.get("container") or container_name(batch)
        items = frozen_items(batch, fields)
        names = _keys_of(items, entity) if keys is None else key_tuple(keys)
        check_rows(items, names)
        if names is not None and len(names) <= FEW and mask is None and lengths is None and "span" not in context:
            kinds = kinds_of(items)
            if kinds is not None:
                self._gather(op, entity, names, kinds, items, columns, context)
                return
        self._emit_gathers()  # a mask or a length they bring may be this batch's
        padding = padding_of(items, lengths, left_padded) or self._known_padding(items, names, left_padded)
        span = context.pop("span", None)
        made = {name: column(name, value, padding, span) for name, value in items.items()}
        if span is None and names is not None:
            self._tell_spans_apart(made, names)
        seen = made.get("response_mask") if mask is None else column("response_mask", mask, padding)
        if mask is not None and seen is not None:
            for item in made.values():
                check_mask(item, seen)
        self._emit(op, entity, made, names, seen, columns, context)

    def produce(self, batch: Any, **options: Any) -> None:
        """Record a batch this stage made. Options as for :meth:`record`, here and below."""
        self.record("produce", batch, **options)

    def consume(self, batch: Any, **options: Any) -> None:
        """Record a batch this stage read."""
        self.record("consume", batch, **options)

    def forward(self, batch: Any, **options: Any) -> None:
        """Record what a forward pass gave."""
        self.record("forward", batch, **options)

    def generate(self, batch: Any, **options: Any) -> None:
        """Record what the engine was sent and what it returned."""
        self.record("generate", batch, **{"entity": "request", **options})

    def score(self, batch: Any, **options: Any) -> None:
        """Record scores."""
        self.record("score", batch, **options)

    def pad(self, batch: Any, **options: Any) -> None:
        """Record a batch after padding: nested to dense, or rows added."""
        self.record("pad", batch, **options)

    def unpad(self, batch: Any, **options: Any) -> None:
        """Record a batch after its padding was taken off."""
        self.record("unpad", batch, **options)

    @guarded
    def compare(
        self,
        field: str,
        a: Any,
        against: str,
        b: Any,
        *,
        mask: Any = None,
        keys: Keys | None = None,
        entity: str = "trajectory",
        lengths: Mapping[str, Sequence[int]] | None = None,
        **context: Any,
    ) -> None:
        """Record how two versions of one field differ, row by row, under the mask.

        Args:
            field: name of ``a``.
            a: ``(n, response_len)``, jagged or padded.
            against: name of ``b``.
            b: the other side, of the same lengths.
            mask: which tokens count; all valid ones when not given.
            keys: ``(n,)`` key of each row.
            entity: what a row is.
            lengths: valid lengths by span, when the tensors are padded.
        """
        padding = padding_of({}, lengths) if lengths is not None else None
        left, right = column(field, a, padding), column(against, b, padding)
        if not np.array_equal(left.rows.lengths, right.rows.lengths):
            # lengths that differ are the finding, and the rows of the two fields show it: there is nothing to compare
            return
        mask_column = None if mask is None else column("response_mask", mask, padding)
        keep = flat_mask(left, mask_column)
        if keep is None:
            keep = window(left)
        pairs = pair_statistics(
            left.rows.values.astype(np.float64), right.rows.values.astype(np.float64), left.rows.lengths, keep
        )
        names = None if keys is None else key_tuple(keys)
        if names is not None and len(names) != left.rows.n:
            raise ValueError(f"{len(names)} keys for {left.rows.n} rows")
        row = self._row("compare", entity, field, left, {"against": against, **context})
        row.pieces.append(Piece(names, left.rows.n, None, None, None, vars(pairs)))

    def reorder(
        self,
        keys: Keys,
        *,
        source_index: Sequence[int],
        tags: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        """Record a new order of rows: ``keys`` as they are now, where each was before, and the tags now beside them."""
        carried = tag_columns(tags) if tags is not None else {}
        self._keys_only("reorder", keys, {"source_index": source_index, **carried}, options)

    def filter(self, keys: Keys, **options: Any) -> None:
        """Record a declared choice of rows; ``columns`` may carry ``status`` and ``reason``."""
        self._keys_only("filter", keys, {}, options)

    def split(self, keys: Keys, **options: Any) -> None:
        """Record the rows of one mini-batch or micro-batch (``mini_batch``, ``ppo_epoch``, ``micro_batch``)."""
        self._keys_only("split", keys, {}, options)

    def dispatch(self, keys: Keys, **options: Any) -> None:
        """Record the rows handed to one rank (``coord``)."""
        self._keys_only("dispatch", keys, {}, options)

    def keys(self, op: str, keys: Keys, **options: Any) -> None:
        """Record a list of keys without content, e.g. a batch descriptor."""
        self._keys_only(op, keys, {}, options)

    def tag(self, keys: Keys, **options: Any) -> None:
        """Record tags put on keys; ``columns`` carry them."""
        self._keys_only("tag", keys, {}, {"field": "status", **options})

    def clear(self, keys: Keys, *, resident: Resident | None = None, **options: Any) -> None:
        """Record keys removed from the queue and what it still holds."""
        self._keys_only("clear", keys, {}, {"field": "status", "resident": resident, **options})

    @guarded
    def event(self, op: str, field: str, *, entity: str = "metric", **context: Any) -> None:
        """Record a row without elements: sleep, wake, cache_reset, topology."""
        self._new_row(op, entity, field, context).pieces.append(Piece(None, 0, None, None, None, None))

    def loss(self, term: LossTerm, **context: Any) -> None:
        """Record one term of the loss on one micro-batch."""
        self.event("produce", "loss", loss=term, **context)

    def optim_step(self, optim: Optim, *, weights: Weights | None = None, **context: Any) -> None:
        """Record one optimiser step and the weights after it."""
        self.event("optim_step", "grad_norm", optim=optim, weights=weights, **context)

    @guarded
    def params(
        self,
        op: str,
        named_tensors: Mapping[str, Any],
        *,
        field: str = "parameters",
        columns: Columns | None = None,
        **context: Any,
    ) -> None:
        """Record named tensors, one element a tensor: a side of a weight sync, or the weights at the start.

        Of a sync the sender's row holds what went over the wire, as cast; the receiver's what it then serves with, by
        its own names. Where it keeps several as one (``qkv_proj``), ``attrs`` maps that name to the names it is made
        of, in their order along the first axis, with commas between.

        Args:
            op: ``sync`` for a side of a weight sync.
            named_tensors: by the names of the state dict, tied tensors and buffers included.
            columns: element columns; ``status`` says ``trainable`` or ``frozen`` of each parameter, null of a buffer.
        """
        frozen = {name: freeze(tensor, copy=False) for name, tensor in named_tensors.items()}
        tensors = [item for item in frozen.values() if isinstance(item, FrozenTensor)]
        names, n = tuple(frozen), len(tensors)
        row = self._new_row(op, "param", field, {"container": "dict", "span": "scalar", **context})
        row.scalars.update(
            layout="dense",
            dtype=",".join(sorted({tensor.dtype for tensor in tensors})),
            device=",".join(sorted({str(tensor.device) for tensor in tensors})),
            shape=(n, -1),
            nbytes=sum(tensor.array.nbytes for tensor in tensors),
        )
        row.content = self.recorder.fingerprint_weights([tensor.array.reshape(-1) for tensor in tensors])
        row.pieces.append(Piece(names, n, None, None, None, columns))

    @guarded
    def metrics(self, values: Mapping[str, float], **context: Any) -> None:
        """Record logged metrics by name."""
        item = column("metrics", np.fromiter(values.values(), dtype=np.float64, count=len(values)))
        piece = Piece(tuple(values), len(values), item, None, None, None)
        self._row("produce", "metric", "metrics", item, {"container": "dict", **context}).pieces.append(piece)

    @guarded
    def _keys_only(self, op: str, keys: Keys, columns: Columns, options: dict[str, Any]) -> None:
        entity = options.pop("entity", "trajectory")
        field = options.pop("field", "key")
        columns = {**columns, **(options.pop("columns", None) or {})}
        names = key_tuple(keys)
        row = self._row(op, entity, field, None, {"container": "KVBatchMeta", **options})
        row.pieces.append(Piece(names, len(names), None, None, None, columns))

    def close(self) -> None:
        """End the stage: its rows and those of the stages inside it go to the step."""
        for child in self.children.values():
            child.close()
        self.children.clear()
        self._finish_rows()


class NullStage:
    """The twin that records nothing: every verb of :class:`Stage` is accepted and does nothing."""

    name = ""

    def _nothing(self, *args: Any, **options: Any) -> None:
        return None

    record = produce = consume = forward = generate = score = pad = unpad = compare = _nothing
    reorder = filter = split = dispatch = keys = tag = clear = event = loss = optim_step = params = metrics = _nothing
    close = _nothing


def _keys_of(items: Mapping[str, Frozen], entity: str) -> tuple[str, ...] | None:
    """Keys a batch brings itself: a field of strings named ``key``, or ``uid`` where the rows are prompts."""
    value = items.get("uid" if entity == "prompt" else "key")
    if isinstance(value, FrozenObjects) and value.dtype == "str":
        return tuple(blob.decode("utf-8", "surrogatepass") for blob in value.blobs)
    return None
