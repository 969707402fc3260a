"""The digest: what one pass keeps, whatever order and shape the rows come in."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import synthetic

from lineage.checks import digest as module
from lineage.checks.digest import Digest, digest, opened

Write = Callable[..., Path]


def _content(found: Digest, *names: str) -> set[tuple[object, ...]]:
    return set(zip(*(found.content[name].to_pylist() for name in names), strict=True))


def _where(rows: list[synthetic.Row], **wanted: str) -> list[synthetic.Row]:
    return [row for row in rows if all(getattr(row, name) == value for name, value in wanted.items())]


@pytest.mark.parametrize("run", [1, 1 << 30])
def test_signatures_do_not_depend_on_how_lists_are_laid_beside_the_keys(
    rows: list[synthetic.Row], write: Write, monkeypatch: pytest.MonkeyPatch, run: int
) -> None:
    path = write(rows)
    usual = digest(opened([path])).events.select(["k", "v", "c", "m"])
    monkeypatch.setattr(module, "_RUN", run)
    assert digest(opened([path])).events.select(["k", "v", "c", "m"]).equals(usual)


def test_content_written_in_another_order_is_kept_under_its_key(rows: list[synthetic.Row], write: Write) -> None:
    names = ("id", "prompts_valid_length", "responses_fingerprint", "input_ids_v")
    before = digest(opened([write(rows)]))
    for row in _where(rows, stage="rollout", op="produce", field="responses"):
        row.lists = {name: np.asarray(values)[::-1] for name, values in row.lists.items()}
    after = digest(opened([write(rows, "turned.parquet")]))
    assert len(after.content) == len(before.content) + 24  # the turned lists of 8 trajectories in 3 steps stand apart
    whole = _content(before, *names)
    assert {line[:2] for line in whole} <= _content(after, *names[:2])
    assert {(line[0], line[2]) for line in whole} <= _content(after, names[0], names[2])


def test_what_is_written_again_later_is_not_what_was_said_first(rows: list[synthetic.Row], write: Write) -> None:
    before = digest(opened([write(rows)]))
    again = copy.deepcopy(_where(rows, stage="rollout", op="produce", field="rm_scores"))
    for row in again:
        row.stage = "advantage"
    after = digest(opened([write(rows + again, "again.parquet")]))
    assert after.content["rm_scores_rid"].equals(before.content["rm_scores_rid"])
    moved = [row for row in rows if (row.op, row.field) != ("produce", "rm_scores")] + again
    assert digest(opened([write(moved, "moved.parquet")])).content["rm_scores_rid"].null_count < len(before.content)


def test_nothing_is_taken_from_steps_that_are_not_judged(rows: list[synthetic.Row], write: Write) -> None:
    path = write(rows)
    whole, part = digest(opened([path])), digest(opened([path]), unseen={("synthetic", 2)})
    steps = dict(zip(whole.events["rid"].to_pylist(), whole.events["global_steps"].to_pylist(), strict=True))
    assert {steps[rid] for rid in whole.content["prompts_rid"].drop_null().to_pylist()} == {1, 2, 3}
    assert {steps[rid] for rid in part.content["prompts_rid"].drop_null().to_pylist()} == {1, 3}


def test_content_put_together_has_every_key_once(rows: list[synthetic.Row], write: Write) -> None:
    whole = digest(opened([write(rows)])).first()
    for row in _where(rows, stage="rollout", op="produce", field="responses"):
        row.lists = {name: np.asarray(values)[::-1] for name, values in row.lists.items()}
    turned = digest(opened([write(rows, "turned.parquet")])).first()
    assert turned.schema.names == whole.schema.names
    assert turned.sort_by("id").to_pylist() == whole.sort_by("id").to_pylist()
