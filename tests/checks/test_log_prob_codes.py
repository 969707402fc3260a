"""Log-probs and loss: what a legal trainer may do that no fault shows, and when a warning is not an error."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic

from lineage.checks import check
from lineage.checks.verdict import Kind, Verdict

Rows = list[synthetic.Row]
KEYS = np.array(["a_0_0", "b_0_0"], dtype=object)


@pytest.fixture
def judge(write: Callable[..., Path]) -> Callable[[str, Rows], Verdict]:
    """The verdict of one code on these rows alone."""

    def _judge(code: str, rows: Rows) -> Verdict:
        (verdict,) = check(write(rows), select=[code]).verdicts
        return verdict

    return _judge


def row(stage: str, op: str, field: str, entity: str = "trajectory", step: int = 1, **columns: Any) -> synthetic.Row:
    """One row; lists and arrays are listed columns."""
    lists = {name: value for name, value in columns.items() if isinstance(value, (list, np.ndarray))}
    scalars = {name: value for name, value in columns.items() if name not in lists}
    if entity == "trajectory":
        lists = {"key": KEYS, **lists}
    return synthetic.Row(stage, op, field, entity, {"global_steps": step, **scalars}, lists)


def compared(absdiff: list[float], tokens: list[int], stage: str = "old_log_prob", **columns: Any) -> synthetic.Row:
    """``old_log_probs`` against the sampler's."""
    field, against = columns.pop("pair", ("old_log_probs", "rollout_log_probs"))
    values = {"absdiff_sum": absdiff, "n_in": tokens, "absdiff_max": absdiff, "n_equal": [0, 0]}
    return row(stage, "compare", field, against=against, span="response", **values, **columns)


def drawn(**sampling: Any) -> synthetic.Row:
    """A request as the engine answered it."""
    return row(
        "rollout", "generate", "responses", "request", key=np.array(["r"], dtype=object), valid_length=[4],
        sampling={"temperature": 1.0, "do_sample": True, **sampling},
    )  # fmt: skip


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"top_k": 4}, {"repetition_penalty": 1.1}])
def test_a_cut_support_is_another_distribution(judge: Callable[..., Verdict], sampling: dict[str, Any]) -> None:
    """Where the sampler left tokens out, its log-probs may differ from the actor's."""
    far = compared([8.0, 8.0], [4, 4])
    assert judge("LGP002", [drawn(), far]).kind is Kind.FAIL
    assert judge("LGP002", [drawn(**sampling), far]).kind is not Kind.FAIL


def test_older_weights_are_other_log_probs(judge: Callable[..., Verdict]) -> None:
    """A row that older weights generated is not held against the actor's log-probs."""
    stale = row("rollout", "tag", "status", step=5, min_global_steps=[1, 1], max_global_steps=[1, 1])
    far = compared([8.0, 8.0], [4, 4])
    far.scalars["global_steps"] = 5
    assert judge("LGP002", [far]).kind is Kind.FAIL
    assert judge("LGP002", [stale, far]).kind is Kind.VACUOUS


@pytest.mark.parametrize(("other", "kind"), [(0.1, Kind.FAIL), (0.99, Kind.PASS)])
def test_one_shifted_row_is_a_warning(judge: Callable[..., Verdict], other: float, kind: Kind) -> None:
    """A lag on every row is an error, one on a long row among others a warning."""
    shifted = {"corr0": [0.1, other], "corr_prev": [0.9, 0.9], "corr_next": [0.0, 0.0]}
    verdict = judge("LGP003", [compared([1.0, 1.0], [300, 300], **shifted)])
    assert (verdict.kind, verdict.warnings) == (kind, 0 if kind is Kind.FAIL else 1)


def test_a_loop_of_several_temperatures_is_not_held_to_one(judge: Callable[..., Verdict]) -> None:
    """Requests at two temperatures leave none that a whole batch could be scored at."""
    scored = row("old_log_prob", "forward", "log_probs", span="sequence", sampling={"temperature": 0.5})
    assert judge("LGP005", [drawn(), scored]).kind is Kind.FAIL
    assert judge("LGP005", [drawn(), drawn(temperature=0.7), scored]).kind is Kind.PASS


@pytest.mark.parametrize(("dtypes", "warned"), [(("float32", "bfloat16"), 1), (("bfloat16", "bfloat16"), 0)])
def test_few_bits_from_the_start_are_no_narrowing(
    judge: Callable[..., Verdict], dtypes: tuple[str, str], warned: int
) -> None:
    """A trainer that computes in bfloat16 throughout loses nothing on the way."""
    stages = (("old_log_prob", "produce"), ("update_actor", "consume"))
    values = {"max_in": [-0.5, -0.5], "min_in": [-1.0, -1.0], "span": "response"}
    rows = [row(*stage, "old_log_probs", dtype=dtype, **values) for stage, dtype in zip(stages, dtypes, strict=True)]
    verdict = judge("LGP007", rows)
    assert (verdict.kind, verdict.warnings) == (Kind.PASS, warned)


@pytest.mark.parametrize(("skipped", "kind"), [(False, Kind.FAIL), (True, Kind.PASS)])
def test_a_skipped_step_that_says_so_is_no_error(judge: Callable[..., Verdict], skipped: bool, kind: Kind) -> None:
    """A gradient that overflowed is legal, if its step was not taken."""
    optim = {"lr": 1e-3, "grad_norm": math.inf, "clip": 1.0, "skipped": skipped}
    verdict = judge("LOS003", [row("update_actor", "optim_step", "grad_norm", "metric", update_index=0, optim=optim)])
    assert verdict.kind is kind


@pytest.mark.parametrize(("denominator", "kind"), [(6.0, Kind.PASS), (2.0, Kind.FAIL)])
def test_a_mini_batch_may_lie_on_two_ranks(judge: Callable[..., Verdict], denominator: float, kind: Kind) -> None:
    """Each rank says its own share, and all of them divide by the whole."""
    rows = []
    for rank, (key, tokens) in enumerate((("a_0_0", 2), ("b_0_0", 4))):
        one = {"key": np.array([key], dtype=object)}
        mask = {"valid_length": [tokens], "mask_sum": [tokens], "fingerprint": [tokens], "mask_fingerprint": [tokens]}
        place = {"update_index": 0, "mini_batch": 0, "coord": {"dp": rank}}
        term = {"term": "pg_loss", "mode": "token-mean", "numerator": 1.0, "denominator": denominator, "scale": 1.0}
        rows += [
            row("rollout", "produce", "loss_mask", span="response", **one, **mask),
            row("update_actor", "split", "key", **one, **place),
            row("update_actor", "produce", "loss", "metric", loss={**term, "rows": 1, "tokens": tokens}, **place),
        ]
    assert judge("LOS001", rows).kind is kind


@pytest.mark.parametrize(("content", "kind"), [([5, 6], Kind.PASS), ([5, 7], Kind.FAIL)])
def test_an_anchor_nobody_declares_has_some_author(
    judge: Callable[..., Verdict], content: list[int], kind: Kind
) -> None:
    """Without a word on bypass_mode old log-probs may be the sampler's; what nobody scored is nobody's."""
    said = {"span": "response", "valid_length": [4, 4]}
    rows = [
        row("rollout", "produce", "rollout_log_probs", fingerprint=[5, 6], **said),
        row("old_log_prob", "produce", "old_log_probs", fingerprint=content, **said),
        row("update_actor", "forward", "log_probs", fingerprint=[8, 9], weights={"phase": "actor"}, **said),
    ]
    assert judge("LGP004", rows).kind is kind


def test_what_validation_leaves_out_is_no_matter_of_training(judge: Callable[..., Verdict]) -> None:
    """Greedy or cut validation draws do not excuse the training batch; pairs of a cut support are not examined."""
    near = compared([0.0, 0.0], [4, 4])
    cut = drawn(top_p=0.9)
    assert judge("LGP002", [cut, near]).kind is Kind.VACUOUS
    cut.scalars["partition"] = "val"
    assert judge("LGP002", [cut, near]).examined == 2
    assert judge("LGP002", [cut, compared([8.0, 8.0], [4, 4])]).kind is Kind.FAIL


@pytest.mark.parametrize(
    ("lr", "gradient", "kind"), [(1e-3, 1.0, Kind.FAIL), (1e-9, 1.0, Kind.PASS), (1e-3, 0.0, Kind.PASS)]
)
@pytest.mark.parametrize("by_loss", [False, True])
def test_an_update_nobody_could_see_leaves_the_ratio_at_1(
    judge: Callable[..., Verdict], lr: float, gradient: float, kind: Kind, by_loss: bool
) -> None:
    """In a warm-up the second mini-batch meets the first one's weights: log-probs and loss are those of ratio 1."""
    optim = {"lr": lr, "grad_norm": gradient, "clip": 1.0, "skipped": False}
    same = compared([0.0, 0.0], [4, 4], "update_actor", pair=("log_probs", "old_log_probs"), update_index=1)
    same.lists["n_equal"] = [1, 1] if by_loss else [4, 4]
    flat = {"mask_sum": [4, 4], "min_in": [-0.5, 0.5], "max_in": [-0.5, 0.5]}
    up = {"mask_sum": [4, 4], "min_in": [0.5, -0.5], "max_in": [0.5, -0.5], "sum_in": [2.0, -2.0]}
    rows = [
        row("advantage", "forward", "advantages", span="response", **up),
        *(
            row("update_actor", "split", "key", update_index=at, mini_batch=at, attrs={"first_update": "0"})
            for at in (0, 1)
        ),
        row("update_actor", "optim_step", "grad_norm", "metric", update_index=0, optim=optim),
        same,
        row("update_actor", "forward", "pg_loss", span="response", update_index=1, sum_in=[-2.0, 2.0], **flat),
    ]
    assert judge("LGP008", rows).kind is kind
