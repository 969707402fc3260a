"""The ways in which two facts can differ, by name: what ``--ignore`` takes, and what counts when it is not used."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from lineage.errors import UserError

#: what the run computed; how it was kept; where and in which pieces. The last never counts: two layouts differ there.
CONTENT, FORM, PLACE = "content", "form", "place"
GROUPS = (CONTENT, FORM, PLACE)


class UnknownAspect(UserError):
    """A name that is no aspect and no group of them."""


@dataclass(frozen=True)
class Aspect:
    """One way in which two facts can differ.

    Attributes:
        name: its name.
        group: :data:`CONTENT`, :data:`FORM` or :data:`PLACE`.
        says: what differs.
        columns: columns of the trace that say it.
    """

    name: str
    group: str
    says: str
    columns: tuple[str, ...] = ()


ASPECTS: tuple[Aspect, ...] = (
    Aspect("steps", CONTENT, "steps that one side has and the other has not"),
    Aspect("missing", CONTENT, "facts that one side has and the other has not, keys asked for in vain among them"),
    Aspect("length", CONTENT, "elements that are data", ("valid_length",)),
    Aspect("mask", CONTENT, "the mask over them", ("mask_sum", "mask_fingerprint")),
    Aspect("fingerprint", CONTENT, "the values themselves", ("fingerprint", "marks")),
    Aspect("weights", CONTENT, "tensors of a model, of which a trace has no statistics to tell rounding by"),
    Aspect("rounding", CONTENT, "values or context numbers that differ, but by no more than --rtol"),
    Aspect(
        "statistics",
        CONTENT,
        "statistics of values whose fingerprint is equal",
        (
            "sum", "first", "last", "last_nnz", "nnz", "nonfinite", "nnz_out", "max_abs_out", "sum_in", "min_in",
            "max_in", "sum_sq_in", "nonfinite_in",
        ),
    ),
    Aspect(
        "comparison",
        CONTENT,
        "what a comparison of two fields found",
        ("absdiff_sum", "absdiff_max", "corr0", "corr_prev", "corr_next", "n_equal", "n_in"),
    ),
    Aspect(
        "tags",
        CONTENT,
        "status, versions, reasons, turns and the other tags of an element",
        (
            "is_padding", "global_steps_tag", "min_global_steps", "max_global_steps", "status", "finish_reason",
            "reason", "num_turns", "expected", "source_index", "data_source", "start", "role", "generated",
            "truncated_from", "trimmed",
        ),
    ),
    Aspect(
        "context",
        CONTENT,
        "weights, sampling, loss, optimiser step, what the queue holds, attrs",
        ("weights", "sampling", "loss", "optim", "resident", "attrs"),
    ),
    Aspect("dtype", FORM, "element type", ("dtype",)),
    Aspect("layout", FORM, "dense or jagged, width of the container", ("layout", "shape", "length")),
    Aspect("device", FORM, "device of the storage", ("device",)),
    Aspect("container", FORM, "what held the field", ("container",)),
    Aspect("producer", FORM, "who made the content", ("producer",)),
    Aspect("consumer", FORM, "who reads it", ("consumer",)),
    Aspect("requires_grad", FORM, "whether the tensor carries a gradient", ("requires_grad",)),
    Aspect("padding", FORM, "facts of padding rows that only one side has"),
    Aspect("copies", FORM, "the same fact said more often on one side"),
    Aspect("micro_batch", FORM, "what is said once a micro-batch, where the sides cut them differently"),
    Aspect("replica", PLACE, "what further ranks of a replica say, and slices of sequences, where one side has none"),
    Aspect("process", PLACE, "who wrote the row", ("process",)),
    Aspect("rank", PLACE, "its rank and coordinates", ("rank", "coord")),
    Aspect("topology", PLACE, "sizes of the parallel layout", ("topology",)),
    Aspect("counters", PLACE, "slot, cache epoch, place at a reorder; tags that a row carries of its keys", ("slot",)),
    Aspect("rows", PLACE, "how facts are cut into rows, and their bytes", ("n", "asked_n", "nbytes", "micro_batch")),
    Aspect("timing", PLACE, "metrics of the wall clock: timing_s/, timing_per_token_ms/, perf/"),
)  # fmt: skip
BY_NAME = {aspect.name: aspect for aspect in ASPECTS}

#: tags that every row about a key carries, as far as its process was told of them; the row that puts them says them
CARRIED = ("is_padding", "global_steps_tag", "min_global_steps", "max_global_steps")

#: columns two facts share that are the same fact; beside them ``weights.phase``, ``loss.term``, of ``missing`` the key
IDENTITY = (
    "global_steps", "stage", "op", "entity", "field", "against", "partition", "span", "ppo_epoch", "update_index",
    "mini_batch", "key", "turn", "missing",
)  # fmt: skip
#: columns that are of one run by their nature, and are not looked at but to put events in order
OF_THE_RUN = ("run_id", "seq", "time_ns", "parent")


def allowed(ignore: Iterable[str] = (), strict: bool = False) -> frozenset[str]:
    """The aspects that are listed and do not make two traces differ.

    Args:
        ignore: names of aspects or groups, each also several with commas between.
        strict: let those of place count too, but for ``timing``.

    Raises:
        UnknownAspect: a name is neither.
    """
    found = {"timing"} | ({aspect.name for aspect in ASPECTS if aspect.group == PLACE} if not strict else set())
    for name in (part.strip() for text in ignore for part in text.split(",")):
        if name in GROUPS:
            found |= {aspect.name for aspect in ASPECTS if aspect.group == name}
        elif name in BY_NAME:
            found.add(name)
        elif name:
            near = get_close_matches(name, (*BY_NAME, *GROUPS), 1)
            meant = f", did you mean {near[0]!r}" if near else ""
            raise UnknownAspect(
                f"--ignore: no aspect {name!r}{meant}; known: {', '.join(BY_NAME)}, and all of {', '.join(GROUPS)}"
            )
    return frozenset(found)
