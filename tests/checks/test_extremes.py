"""Runs that leave little to chance, or throw the policy far: what is legal of them, and what still is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import synthetic

from lineage.checks import check
from lineage.checks.verdict import Kind, Verdict

Rows = list[synthetic.Row]
KEYS = np.array(["a_0_0", "b_0_0"], dtype=object)
TOKENS = [300, 300]


def judged(path: Path, code: str, rows: Rows, config: dict[str, Any] | None = None) -> Verdict:
    """What one code says of these rows, of a run with this configuration."""
    trace = path / "trace.parquet"
    pq.write_table(synthetic.to_table(rows).replace_schema_metadata(synthetic.metadata(config)), trace)
    (verdict,) = check(trace, select=[code]).verdicts
    return verdict


def row(stage: str, op: str, field: str, entity: str = "trajectory", **columns: Any) -> synthetic.Row:
    """One row of step 1; lists and arrays are listed columns."""
    lists = {name: value for name, value in columns.items() if isinstance(value, (list, np.ndarray))}
    scalars = {name: value for name, value in columns.items() if name not in lists}
    if entity == "trajectory":
        lists = {"key": KEYS, **lists}
    return synthetic.Row(stage, op, field, entity, {"global_steps": 1, **scalars}, lists)


def sums(stage: str, op: str, field: str, added: list[float], **columns: Any) -> synthetic.Row:
    """Log-probs of :data:`TOKENS` that add up to so much."""
    low = [2 * one / tokens for one, tokens in zip(added, TOKENS, strict=True)]
    values: dict[str, Any] = {
        "sum_in": added,
        "mask_sum": TOKENS,
        "valid_length": TOKENS,
        "min_in": low,
        "max_in": [-0.1, -0.1],
    }
    return row(stage, op, field, span="response", **(values | columns))


def compared(field: str, against: str, far: float, stage: str = "update_actor", **columns: Any) -> synthetic.Row:
    """Two sides whose tokens are ``far`` apart at most, and half of that in the mean."""
    values: dict[str, Any] = {
        "absdiff_sum": [150 * far, 150 * far],
        "absdiff_max": [far, far],
        "n_in": TOKENS,
        "n_equal": [0, 0],
    }
    return row(stage, "compare", field, against=against, span="response", **values, **columns)


SAMPLED = {"temperature": 1.0, "logprobs_mode": "processed_logprobs"}


@pytest.mark.parametrize(
    ("rollout", "failed"),
    [
        (SAMPLED, True),
        ({**SAMPLED, "temperature": 0.1}, True),  # of the temperature's own distribution: as rare as they say
        ({**SAMPLED, "do_sample": False}, False),
        ({**SAMPLED, "top_k": 1}, False),
        ({"temperature": 0.1, "logprobs_mode": "raw_logprobs"}, False),
        ({**SAMPLED, "val_kwargs": {"do_sample": False}}, True),  # these are rows of the training
    ],
)
@pytest.mark.parametrize("one_prompt", [True, False])
def test_where_nothing_is_left_to_chance_one_prompt_has_one_answer(
    rows: Rows, tmp_path: Path, rollout: dict[str, Any], failed: bool, one_prompt: bool
) -> None:
    """Greedy answers to one prompt of two groups are alike; those to two prompts are copies however they were drawn."""
    written = {one.field: one for one in rows if (one.stage, one.op) == ("rollout", "produce")}
    keys = [str(key).split("_")[0] for key in written["responses"].lists["key"]]
    other = next(at for at in range(1, len(keys)) if keys[at] != keys[0])
    for field in ("responses", "rollout_log_probs", *(["prompts"] if one_prompt else [])):
        for name in written[field].lists.keys() - {"key", "slot"}:
            written[field].lists[name] = written[field].lists[name].copy()
            written[field].lists[name][other] = written[field].lists[name][0]
    written["rollout_log_probs"].lists["sum_in"][[0, other]] = -60.0
    found = judged(tmp_path, "KEY004", rows, {"actor_rollout_ref": {"rollout": rollout}})
    assert (found.kind is Kind.FAIL) is (failed or not one_prompt)


@pytest.mark.parametrize(("far", "kind"), [(5.0, Kind.FAIL), (25.0, Kind.VACUOUS)])
def test_the_drift_of_ratios_that_were_cut_is_nobodys_sum(tmp_path: Path, far: float, kind: Kind) -> None:
    """The loss cuts a log ratio at 20, and the totals of the rows do not show what is left."""
    rows = [
        sums("old_log_prob", "produce", "old_log_probs", [-300.0, -300.0]),
        sums("update_actor", "forward", "log_probs", [-600.0, -600.0], update_index=0),
        compared("log_probs", "old_log_probs", far, update_index=0),
        row("metrics", "produce", "metrics", "metric", key=np.array(["actor/ppo_kl"], dtype=object), sum=[0.5]),
        row("rollout", "produce", "responses", span="response", valid_length=TOKENS, fingerprint=[1, 2]),
        row("rollout", "produce", "key", is_padding=[False, False]),
    ]
    assert judged(tmp_path, "MET001", rows).kind is kind


@pytest.mark.parametrize(("apart", "warned"), [(0.3, 1), (1e-5, 0)])
def test_a_kl_may_round_to_0_where_the_policies_are_near(tmp_path: Path, apart: float, warned: int) -> None:
    """In float32 the third estimator of a difference of 1e-4 is 0; that of 1e-3 is not."""
    place = {"update_index": 1, "micro_batch": 0}
    term = {"term": "kl_loss", "mode": "token-mean", "numerator": 0.0, "denominator": 1.0, "scale": 0.1, "rows": 2}
    rows = [
        sums("ref_log_prob", "produce", "ref_log_prob", [-300.0, -300.0]),
        sums("update_actor", "forward", "log_probs", [-300.0 - 300 * apart, -300.0], **place),
        row("update_actor", "produce", "loss", "metric", loss={**term, "tokens": 600}, **place),
    ]
    config = {"actor_rollout_ref": {"actor": {"use_kl_loss": True, "kl_loss_coef": 0.1}}}
    found = judged(tmp_path, "LOS004", rows, config)
    assert len([one for one in found.violations if one.expected == "a KL that is not 0"]) == warned


@pytest.mark.parametrize(
    ("shifted", "reference", "kind"), [(0.9, -310.0, Kind.FAIL), (0.4, -310.0, Kind.PASS), (0.9, -900.0, Kind.PASS)]
)
def test_a_policy_that_finds_all_tokens_less_likely_tells_no_shift(
    tmp_path: Path, shifted: float, reference: float, kind: Kind
) -> None:
    """A text that repeats itself may have the log-probs of two policies alike a token on."""
    lag = {"corr0": [-0.2, -0.2], "corr_prev": [shifted, shifted], "corr_next": [0.0, 0.0]}
    rows = [
        sums("old_log_prob", "produce", "old_log_probs", [-300.0, -300.0]),
        sums("ref_log_prob", "produce", "ref_log_prob", [reference, reference]),
        compared("ref_log_prob", "old_log_probs", 4.0, "ref_log_prob", **lag),
    ]
    assert judged(tmp_path, "LGP003", rows).kind is kind


@pytest.mark.parametrize(("update", "kind"), [(-300.0, Kind.FAIL), (-1e-3, Kind.PASS)])
def test_a_policy_that_is_certain_has_log_probs_of_0(tmp_path: Path, update: float, kind: Kind) -> None:
    """Zeros are a placeholder, unless the actor finds the tokens as certain."""
    rows = [
        sums("rollout", "produce", "rollout_log_probs", [0.0, 0.0], max_in=[0.0, 0.0]),
        sums("update_actor", "forward", "log_probs", [update, update], max_in=[0.0, 0.0], update_index=0),
    ]
    for one in rows:
        one.lists["nonfinite_in"] = [0, 0]
    assert judged(tmp_path, "LGP001", rows).kind is kind
