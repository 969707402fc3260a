"""The rows of one open stage: what belongs to one row, what is gathered first, which mask a field is seen under."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from lineage.batch import FieldColumn, Padding
from lineage.errors import UsageError
from lineage.freeze import Frozen, FrozenNested, FrozenTensor
from lineage.gather import Gather, Kind
from lineage.row import CONTEXT_NAMES, Piece, Row
from lineage.vocabulary import TWO_SPANS
from lineage.windows import cuts_of, flat_mask

if TYPE_CHECKING:
    from lineage.recorder import Recorder

Columns = Mapping[str, Sequence[Any]]
Verb = TypeVar("Verb", bound=Callable[..., None])

# context that describes a row without telling it from another of the same stage
_DESCRIPTIVE = frozenset({"asked_n", "missing", "attrs", "resident", "topology"})
_LENGTH_TAGS = {"prompts": "prompt_len", "responses": "response_len", "input_ids": "seq_len"}


def guarded(verb: Verb) -> Verb:
    """A verb that fails on its input counts a lost row and lets training go on; a misspelt option is the caller's."""

    @functools.wraps(verb)
    def guarded_verb(self: Any, *args: Any, **options: Any) -> None:
        try:
            verb(self, *args, **options)
        except UsageError:
            raise
        except Exception as error:
            self.recorder.drop(1, f"{self.name}.{verb.__name__}: {type(error).__name__}: {error}")

    return cast(Verb, guarded_verb)


def key_tuple(keys: Sequence[Any]) -> tuple[str, ...]:
    """Keys as strings, whatever the caller numbers its rows with."""
    names = tuple(keys)
    return names if all(type(name) is str for name in names) else tuple(str(name) for name in names)


def check_rows(items: Mapping[str, Frozen], names: tuple[str, ...] | None) -> None:
    """Refuse a batch whose fields have not one row a key: its rows could only be given to the wrong ones.

    Raises:
        ValueError: a field has more or fewer rows.
    """
    if names is None:
        return
    for field, item in items.items():
        if isinstance(item, FrozenTensor):
            n = item.array.shape[0] if item.array.ndim else 1
        else:
            n = len(item.lengths) if isinstance(item, FrozenNested) else len(item.blobs)
        if n != len(names):
            raise ValueError(f"{len(names)} keys for {n} rows of {field}")


def check_context(context: Mapping[str, Any], options: frozenset[str] = frozenset()) -> None:
    """Refuse a misspelt option.

    Raises:
        UsageError: names it and what is known.
    """
    unknown = context.keys() - CONTEXT_NAMES - options
    if unknown:
        raise UsageError(f"unknown context {sorted(unknown)}; known: {sorted(CONTEXT_NAMES)}")


class StageRows:
    """Rows by identity. A stage's verbs add pieces to them; when it ends they go to the recorder.

    Args:
        recorder, name, producer, consumer, context: as for :class:`lineage.stage.Stage`.
    """

    def __init__(
        self, recorder: Recorder, name: str, producer: str | None, consumer: str | None, context: Mapping[str, Any]
    ) -> None:
        self.recorder = recorder
        self.name = name
        self.producer = producer
        self.consumer = consumer
        self.context = dict(context)
        self._kept = False  # the recorder knows that there are rows
        self._rows: dict[tuple[Any, ...], Row] = {}
        self._bases: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._masks: dict[tuple[str, ...], FieldColumn] = {}
        self._gathers: dict[tuple[Any, ...], Gather] = {}

    def _finish_rows(self) -> None:
        self._emit_gathers()
        self._kept = False
        rows, self._rows = self._rows, {}
        self._masks.clear()
        for row in rows.values():
            self.recorder.finish(row)

    def _emit(
        self,
        op: str,
        entity: str,
        made: Mapping[str, FieldColumn],
        names: tuple[str, ...] | None,
        mask: FieldColumn | None,
        columns: Columns | None,
        context: dict[str, Any],
    ) -> list[Row]:
        """Add one piece a field to the rows of the stage."""
        lens = None
        if entity == "trajectory":
            if names is not None:
                self._note_lengths(made, names)
                if mask is None:
                    mask = self._masks.get(names)
                else:
                    self._masks[names] = mask
            if "prompts" in made:
                lens = made["prompts"].rows.valid_lengths
            elif names is not None:
                lens = self.recorder.elements.lengths(names, "prompt_len")
        rows = []
        for field, item in made.items():
            row = self._row(op, entity, field, item, context)
            row.pieces.append(Piece(names, item.rows.n, item, flat_mask(item, mask), cuts_of(item, lens), columns))
            rows.append(row)
        return rows

    def _note_lengths(self, made: Mapping[str, FieldColumn], names: tuple[str, ...]) -> None:
        """Remember how long each key's prompt and response are where no tag says so: later fields may be padded."""
        elements = self.recorder.elements
        for field, tag in _LENGTH_TAGS.items():
            item = made.get(field)
            if item is None or item.width != 1 or (item.layout != "jagged" and item.rows.valid is None):
                continue
            if elements.lengths(names, tag) is None:
                elements.note(names, [{tag: int(length)} for length in item.rows.valid_lengths])

    def _known_padding(
        self, items: Mapping[str, Frozen], names: tuple[str, ...] | None, left_padded: Sequence[str]
    ) -> Padding | None:
        """Padding of dense fields that came without an attention mask: by the lengths known of their keys."""
        if names is None or not any(isinstance(item, FrozenTensor) and item.array.ndim > 1 for item in items.values()):
            return None
        elements = self.recorder.elements
        tags = {"prompt": "prompt_len", "response": "response_len", "sequence": "seq_len"}
        valid = {span: found for span, tag in tags.items() if (found := elements.lengths(names, tag)) is not None}
        starts = {}
        prompts = items.get("prompts")
        if isinstance(prompts, FrozenTensor) and "prompts" in left_padded and "prompt" in valid:
            starts["prompt"] = prompts.array.shape[-1] - valid["prompt"]
        valid.pop("sequence", None)  # where a padded sequence starts depends on a prompt width nobody said
        return Padding(valid, starts) if valid else None

    def _tell_spans_apart(self, made: Mapping[str, FieldColumn], names: tuple[str, ...]) -> None:
        """A name used at two spans covers the sequence where its rows are as long as the keys' sequences."""
        for field in TWO_SPANS.intersection(made):
            sequence = self.recorder.elements.lengths(names, "seq_len")
            if sequence is not None:
                item = made[field]
                item.span = "sequence" if np.array_equal(sequence, item.rows.valid_lengths) else "response"

    def _gather(
        self,
        op: str,
        entity: str,
        names: tuple[str, ...],
        kinds: tuple[Kind, ...],
        items: Mapping[str, Frozen],
        columns: Columns | None,
        context: dict[str, Any],
    ) -> None:
        """Keep a small batch until the stage ends, or until a larger one may need what it says."""
        check_context(context)
        self._keep()
        identity = (op, entity, *_identity(context), kinds)
        gather = self._gathers.get(identity)
        if gather is None:
            seq = self.recorder.reserve(len(kinds))
            gather = self._gathers[identity] = Gather(op, entity, context, kinds, seq, self.recorder.now())
        else:
            _describe(gather.context, context)
        gather.add(names, items, columns)

    def _emit_gathers(self) -> None:
        gathers, self._gathers = self._gathers, {}
        for gather in gathers.values():
            self._emit_gathered(gather)

    @guarded
    def _emit_gathered(self, gather: Gather) -> None:
        made = gather.fields()
        names = tuple(gather.keys)
        self._tell_spans_apart(made, names)
        rows = self._emit(
            gather.op, gather.entity, made, names, made.get("response_mask"), gather.element_columns(), gather.context
        )
        for number, row in enumerate(rows):
            if len(row.pieces) == 1:  # a row of its own: it began when the first of the batches came
                row.seq, row.scalars["time_ns"] = gather.seq + number, gather.time_ns

    def _row(self, op: str, entity: str, field: str, item: FieldColumn | None, context: Mapping[str, Any]) -> Row:
        """The open row of this identity, made if there is none."""
        base = (op, entity, *_identity(context))
        identity = (base, field, None) if item is None else (base, field, item.layout, item.span, item.dtype)
        row = self._rows.get(identity)
        if row is not None:
            _describe(row.scalars, context)
            return row
        self._keep()
        known = self._bases.get(base)
        if known is None:
            known = self._bases[base] = self._scalars(op, entity, context)
        described = {name: context[name] for name in _DESCRIPTIVE.intersection(context)}
        row = self._rows[identity] = self.recorder.new_row({**known, **described, "field": field}, item)
        return row

    def _new_row(
        self, op: str, entity: str, field: str, context: Mapping[str, Any], item: FieldColumn | None = None
    ) -> Row:
        """A row of its own even where one of the same identity is open: events do not merge."""
        self._keep()
        row = self.recorder.new_row({**self._scalars(op, entity, context), **context, "field": field}, item)
        self._rows[(op, field, row.seq)] = row
        return row

    def _keep(self) -> None:
        if not self._kept:
            self._kept = True
            self.recorder.keep(cast(Any, self))

    def _scalars(self, op: str, entity: str, context: Mapping[str, Any]) -> dict[str, Any]:
        """What all rows of one call share; what only describes one of them is left out."""
        check_context(context)
        reads = op in ("consume", "clear")
        scalars = {
            "stage": self.name,
            "op": op,
            "entity": entity,
            "producer": None if reads else self.producer,
            "consumer": self.producer if reads else self.consumer,
        }
        scalars.update(self.context)
        scalars.update({name: value for name, value in context.items() if name not in _DESCRIPTIVE})
        return scalars


def _identity(context: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(
        (name, tuple(value.items()) if isinstance(value, dict) else value)
        for name, value in context.items()
        if value is not None and name not in _DESCRIPTIVE
    )


def _describe(known: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Another call of the same row: what was asked adds up, what is left is what was left last."""
    if more.get("asked_n") is not None:
        known["asked_n"] = (known.get("asked_n") or 0) + more["asked_n"]
        known["missing"] = [*(known.get("missing") or ()), *(more.get("missing") or ())]
    if more.get("resident") is not None:
        known["resident"] = more["resident"]
    if more.get("attrs"):
        known["attrs"] = {**(known.get("attrs") or {}), **more["attrs"]}
