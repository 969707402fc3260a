"""What was drawn, and taken off the reward, as configured: what a legal run may do that no fault shows."""

from __future__ import annotations

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
Judge = Callable[..., Verdict]


@pytest.fixture
def judge(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Judge:
    """The verdict of one code on these rows alone, of a run with this configuration."""

    def _judge(code: str, rows: Rows, config: dict[str, Any] | None = None) -> Verdict:
        monkeypatch.setattr(synthetic, "CONFIG", config or {})
        (verdict,) = check(write(rows), select=[code]).verdicts
        return verdict

    return _judge


def row(stage: str, op: str, field: str, step: int = 1, **columns: Any) -> synthetic.Row:
    """One row of two trajectories; lists are listed columns."""
    lists = {name: value for name, value in columns.items() if isinstance(value, (list, np.ndarray))}
    scalars = {name: value for name, value in columns.items() if name not in lists}
    return synthetic.Row(stage, op, field, "trajectory", {"global_steps": step, **scalars}, {"key": KEYS, **lists})


def drawn(field: str = "responses", partition: str | None = None, high: float = 3.0, **sampling: Any) -> synthetic.Row:
    """Two requests as the engine answered them."""
    told = {"temperature": 1.0, "do_sample": True, **sampling}
    values = {"valid_length": [4, 4], "max_in": [high, 0.0], "min_in": [0.0, 0.0]}
    asked = row("rollout", "generate", field, partition=partition, sampling=told, **values)
    return synthetic.Row(asked.stage, asked.op, asked.field, "request", asked.scalars, asked.lists)


def rollout(**settings: Any) -> dict[str, Any]:
    """A configuration that says how its rollout draws."""
    return {"actor_rollout_ref": {"rollout": {"temperature": 1.0, "top_p": 1.0, "top_k": -1, **settings}}}


GREEDY = {"temperature": 0.0, "do_sample": False}
OWN_LOOP = {"agent": {"default_agent_loop": "mine"}}


@pytest.mark.parametrize(
    ("settings", "asked", "kind", "warnings"),
    [
        ({"temperature": 0.7}, {}, Kind.FAIL, 0),
        ({"top_k": 0}, {"top_k": -1, "top_p": 1.0}, Kind.PASS, 0),
        ({"top_k": 1}, {"do_sample": False}, Kind.PASS, 0),
        ({"top_p": 0.9, "top_k": 4}, {}, Kind.PASS, 0),  # the engine does not say
        ({"top_k": 4, **OWN_LOOP}, {"top_k": -1}, Kind.PASS, 1),
        ({"val_kwargs": GREEDY}, {"partition": "val", "do_sample": False}, Kind.PASS, 0),
        ({"val_kwargs": GREEDY}, {"partition": "val"}, Kind.FAIL, 0),
        ({"temperature": 0.7, "val_kwargs": {"temperature": 1.0}}, {"partition": "val"}, Kind.PASS, 0),
    ],
)
def test_requests_are_drawn_as_configured(
    judge: Judge, settings: dict[str, Any], asked: dict[str, Any], kind: Kind, warnings: int
) -> None:
    """One likeliest token may be said in several ways; a loop of the user's own may ask as it likes."""
    verdict = judge("LGP005", [drawn(**asked)], rollout(**settings))
    assert (verdict.kind, verdict.warnings) == (kind, warnings)


def test_a_row_may_name_a_loop_of_its_own(judge: Judge) -> None:
    """As a configuration may: the trace has the names that rows ask for."""
    for names, kind, warnings in (("single_turn_agent,tool_agent", Kind.FAIL, 0), ("loop.py:Mine", Kind.PASS, 1)):
        asked = row("dataset", "produce", "index")
        asked.scalars["map_attrs"] = [("agent_name", names)]
        verdict = judge("LGP005", [asked, drawn()], rollout(temperature=0.7))
        assert (verdict.kind, verdict.warnings) == (kind, warnings)


def test_a_greedy_baseline_is_no_sample(judge: Judge) -> None:
    """ReMax asks for a greedy answer beside the sampled ones."""
    config = {**rollout(), "algorithm": {"adv_estimator": "remax"}}
    assert judge("LGP005", [drawn(), drawn(**GREEDY)], config).kind is Kind.PASS
    assert judge("LGP005", [drawn(), drawn(**GREEDY)], rollout()).kind is Kind.FAIL


@pytest.mark.parametrize(
    ("field", "asked", "kind"),
    [
        ("likelier", {"top_k": 4}, Kind.PASS),
        ("likelier", {"top_k": 3}, Kind.FAIL),
        ("likelier", {"top_p": 0.9}, Kind.PASS),
        ("likelier", {"do_sample": False}, Kind.FAIL),
        ("likelier_mass", {"top_p": 0.9, "high": 0.899}, Kind.PASS),
        ("likelier_mass", {"top_p": 0.9, "high": 0.91}, Kind.FAIL),
    ],
)
def test_a_token_stands_inside_what_could_be_drawn(judge: Judge, field: str, asked: dict[str, Any], kind: Kind) -> None:
    """Fewer than top_k tokens are likelier than one of the top_k, and none than a greedy one."""
    assert judge("LGP005", [drawn(field, **asked)]).kind is kind


def scored(old: float, sampler: float, update: float) -> Rows:
    """Three passes over two rows of four tokens, each so many nats a token from the truth."""

    def apart(stage: str, field: str, against: str, distance: float) -> synthetic.Row:
        values = {"absdiff_sum": [4 * distance] * 2, "absdiff_max": [distance] * 2, "n_in": [4, 4], "n_equal": [0, 0]}
        place = {"update_index": 0} if stage == "update_actor" else {}
        return row(stage, "compare", field, against=against, span="response", **values, **place)

    def made(stage: str, op: str, field: str, off: float, **place: Any) -> synthetic.Row:
        return row(stage, op, field, span="response", sum_in=[-4 - 4 * off] * 2, mask_sum=[4, 4], **place)

    actor = {"version": 0, "phase": "actor"}
    return [
        made("rollout", "produce", "rollout_log_probs", sampler),
        row("old_log_prob", "forward", "log_probs", span="sequence", weights=actor),
        made("old_log_prob", "produce", "old_log_probs", old),
        apart("old_log_prob", "old_log_probs", "rollout_log_probs", abs(old - sampler)),
        row("update_actor", "split", "key", update_index=0, mini_batch=0),
        made("update_actor", "forward", "log_probs", update, update_index=0),
        apart("update_actor", "log_probs", "old_log_probs", abs(update - old)),
    ]


@pytest.mark.parametrize(
    ("passes", "kind"), [((2.0, 0.0, 0.0), Kind.FAIL), ((0.0, 2.0, 0.0), Kind.PASS), ((0.0, 2.0, -2.0), Kind.PASS)]
)
def test_of_three_passes_the_odd_one_is_blamed(judge: Judge, passes: tuple[float, ...], kind: Kind) -> None:
    """Old log-probs are wrong where sampler and update agree against them, not where it is the sampler that is off."""
    assert judge("VER004", scored(*passes)).kind is kind


def penalised(step: int, coef: float, after: float) -> Rows:
    """The rewards of a batch of one trajectory that trains, less a KL twice its target."""
    said = [("kl", "0.2"), ("kl_coef", repr(coef)), ("kl_rows", "1"), ("kl_coef_next", repr(after))]
    values = {"fingerprint": [1, 2], "nnz_out": [0, 0], "sum": [0.0, 0.0], "mask_sum": [4, 0]}
    mask = row("rollout", "produce", "response_mask", step, span="response", mask_sum=[4, 0], valid_length=[4, 4])
    scores = row("advantage", "forward", "token_level_scores", step, span="response", **values)
    rewards = row("advantage", "forward", "token_level_rewards", step, span="response", **values)
    rewards.scalars["map_attrs"] = said
    return [mask, scores, rewards]


@pytest.mark.parametrize(
    ("steps", "kind"),
    [
        ([(1, 0.1, 0.102), (2, 0.102, 0.10404)], Kind.PASS),
        ([(7, 0.3, 0.306)], Kind.PASS),  # goes on from a checkpoint
        ([(1, 0.1, 0.102), (4, 0.3, 0.306)], Kind.PASS),  # the steps between were not traced
        ([(1, 0.3, 0.306)], Kind.FAIL),
        ([(1, 0.1, 0.102), (2, 0.1, 0.102)], Kind.FAIL),
        ([(1, 0.1, 0.1)], Kind.FAIL),
    ],
)
def test_an_adaptive_coefficient_is_replayed(judge: Judge, steps: list[tuple[int, float, float]], kind: Kind) -> None:
    """It begins as configured and goes on from where the batch before left it, where that batch is known."""
    control = {"type": "adaptive", "kl_coef": 0.1, "target_kl": 0.1, "horizon": 10}
    config = {"algorithm": {"use_kl_in_reward": True, "kl_penalty": "kl", "kl_ctrl": control}}
    assert judge("REW005", [one for step in steps for one in penalised(*step)], config).kind is kind


def begun(field: str, **attrs: str) -> synthetic.Row:
    """A row of the init stage."""
    return synthetic.Row("init", "produce", field, "metric", {"global_steps": 0, "map_attrs": list(attrs.items())})


LOADED, WITH_ROWS, WITHOUT = (
    begun("_load_checkpoint", global_steps="0"),
    begun("_init_dataloader", val_rows="3"),
    begun("_init_dataloader", val_rows="0"),
)


@pytest.mark.parametrize(
    ("code", "stage", "first", "settings", "done", "missing"),
    [
        ("VER001", "checkpoint", LOADED, {"save_freq": 1}, [1, 3], [2]),
        ("VER001", "checkpoint", LOADED, {"save_freq": 2, "total_training_steps": 3}, [2], [3]),
        ("VER001", "checkpoint", LOADED, {"save_freq": 2}, [2], []),  # how long the run is nobody says
        ("VER001", "checkpoint", LOADED, {"save_freq": -1}, [], []),
        ("VER001", "checkpoint", WITH_ROWS, {"save_freq": 1}, [], []),  # it records no checkpoints
        ("MET001", "validate", WITH_ROWS, {"test_freq": 1}, [1, 3], [2]),
        ("MET001", "validate", WITH_ROWS, {"test_freq": 2, "total_training_steps": 3}, [], [2, 3]),
        ("MET001", "validate", WITH_ROWS, {"test_freq": -1}, [], []),
        ("MET001", "validate", WITHOUT, {"test_freq": 1}, [], []),
        ("MET001", "validate", LOADED, {"test_freq": 1}, [], []),
    ],
)
def test_what_falls_due_is_done(
    judge: Judge,
    rows: Rows,
    code: str,
    stage: str,
    first: synthetic.Row,
    settings: dict[str, int],
    done: list[int],
    missing: list[int],
) -> None:
    """A checkpoint or a validation, every so many steps and at the last one of a run that says how long it is."""
    seen = [synthetic.Row(stage, "produce", "done", "metric", {"global_steps": step}) for step in done]
    at = {step: next(i for i, one in enumerate(rows) if one.scalars["global_steps"] == step) for step in done}
    for step, one in reversed(list(zip(done, seen, strict=True))):
        rows.insert(at[step], one)
    verdict = judge(code, [first, *rows], {**synthetic.CONFIG, "trainer": settings})
    assert [one.global_steps for one in verdict.violations] == missing
