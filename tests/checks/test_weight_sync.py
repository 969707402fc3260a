"""What a weight sync may look like, and the versions a trajectory may have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lineage import hooks
from lineage.checks import Kind, Verdict, check
from lineage.hooks import Stage, Weights

ACTOR, ENGINE = Weights(1, "actor"), Weights(1, "engine", cache_epoch=1)
Tensors = dict[str, np.ndarray]


def tensors(seed: int = 0) -> Tensors:
    """A small state dict; its lm_head is its embedding."""
    rng = np.random.default_rng(seed)
    shapes = {"embed_tokens.weight": (6, 4), "q_proj.weight": (4, 4), "k_proj.weight": (2, 4), "v_proj.weight": (2, 4)}
    made = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return made | {"lm_head.weight": made["embed_tokens.weight"]}


@pytest.fixture
def judged(tmp_path: Path) -> Callable[..., Verdict]:
    """Record what a function says of a step and judge it by one code."""

    def _judged(code: str, say: Callable[[Stage], None], config: Mapping[str, Any] | None = None) -> Verdict:
        folder = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        with hooks.recording(folder, config=config or {}) as recorder:
            recorder.step(1)
            with recorder.stage("weight_sync") as stage:
                say(stage)
            recorder.seal()
        (verdict,) = check(folder, select=[code]).verdicts
        return verdict

    return _judged


def sync(stage: Stage, sent: Tensors, resident: Tensors, fused: Mapping[str, str] | None = None) -> None:
    """The two rows of a sync."""
    stage.params("sync", sent, weights=ACTOR)
    stage.params("sync", resident, weights=ENGINE, attrs=dict(fused or {}))


def fused_like(sent: Tensors, parts: list[str]) -> Tensors:
    """What an engine keeps that holds these parts as one, and no lm_head of its own."""
    joined = np.concatenate([sent[name] for name in parts])
    return {"embed_tokens.weight": sent["embed_tokens.weight"], "qkv_proj.weight": joined}


PARTS = ["q_proj.weight", "k_proj.weight", "v_proj.weight"]
FUSED = {"qkv_proj.weight": ",".join(PARTS), "dtype": "float32"}


def test_a_fused_tensor_is_composed_of_its_parts(judged):
    """An engine that keeps q, k and v as one, and one tensor for a tied head, has what was sent."""
    sent = tensors()
    verdict = judged("VER002", lambda stage: sync(stage, sent, fused_like(sent, PARTS), FUSED))
    assert (verdict.kind, verdict.examined) == (Kind.PASS, 2)


@pytest.mark.parametrize("parts", [["k_proj.weight", "q_proj.weight", "v_proj.weight"], PARTS[:2]])
def test_a_fused_tensor_of_other_parts_is_named(parts, judged):
    """Parts in another order, or one of them missing, make another tensor."""
    sent = tensors()
    verdict = judged("VER002", lambda stage: sync(stage, sent, fused_like(sent, parts), FUSED))
    assert {one.key for one in verdict.violations} == {"qkv_proj.weight"}


def test_a_tensor_the_engine_was_never_sent_is_named(judged):
    """A name of the engine's own that nothing was sent for, and a sent one it has no place for."""
    sent, resident = tensors(), tensors()
    resident["bias"] = np.ones(3, dtype=np.float32)
    del resident["v_proj.weight"]
    verdict = judged("VER002", lambda stage: sync(stage, sent, resident))
    assert {(one.key, one.actual) for one in verdict.violations} == {
        ("bias", "never sent"),
        ("v_proj.weight", "not in the engine"),
    }


def test_a_head_tied_at_the_start_stays_tied(judged):
    """A tied head that is sent with other content than the embedding is stale, though the engine has just that."""

    def say(stage: Stage, stale: bool) -> None:
        with hooks.recorder().stage("init") as init:
            init.params("produce", tensors(), weights=Weights(0, "actor"))
        sent = tensors(seed=1)
        if stale:
            sent["lm_head.weight"] = tensors()["lm_head.weight"]
        sync(stage, sent, sent)

    assert judged("VER002", lambda stage: say(stage, stale=False)).kind is Kind.PASS
    verdict = judged("VER002", lambda stage: say(stage, stale=True))
    assert {one.key for one in verdict.violations} == {"lm_head.weight"}


@pytest.mark.parametrize(
    ("mode", "low", "errors"), [("separate_async", 0, 0), ("separate_async", 2, 1), ("sync", 0, 1)]
)
def test_an_asynchronous_run_may_train_on_older_versions(mode, low, errors, judged):
    """Tags between 0 and the last version are legal there, newer ones nowhere; in a synchronous run they are one."""

    def say(stage: Stage) -> None:
        sync(stage, tensors(), tensors())
        with hooks.recorder().stage("rollout") as rollout:
            columns = {"global_steps_tag": [1], "min_global_steps": [low], "max_global_steps": [max(low, 1)]}
            rollout.tag(["q_0_0"], partition="train", columns=columns)

    config = {"trainer": {"v1": {"trainer_mode": mode}}}
    assert judged("VER001", say, config).errors == errors


@pytest.mark.parametrize(("threshold", "kind"), [(2, Kind.PASS), (1, Kind.PASS), (None, Kind.VACUOUS)])
def test_staleness_is_judged_where_it_has_a_limit(threshold, kind, judged):
    """Rows of the version before are within any limit; without one there is nothing to judge."""

    def say(stage: Stage) -> None:
        with hooks.recorder().stage("sample") as sample:
            sample.keys("produce", ["q_0_0"], columns={"min_global_steps": [0], "max_global_steps": [0]})

    sampler = {"max_off_policy_threshold": threshold}
    config = {"trainer": {"v1": {"trainer_mode": "separate_async", "sampler": sampler}}}
    assert judged("VER005", say, config).kind is kind


def test_steps_nobody_traced_are_no_missed_sync(rows, write):
    """With every second step traced the engine comes back with a version nobody saw it get."""
    kept = [row for row in rows if row.scalars["global_steps"] != 2]
    verdicts = check(write(kept), select=["VER001", "VER003", "VER006", "VER007"]).verdicts
    assert {verdict.code: (verdict.errors, verdict.warnings) for verdict in verdicts} == dict.fromkeys(
        ["VER001", "VER003", "VER006", "VER007"], (0, 0)
    )


@pytest.mark.parametrize(
    ("dtype", "apart", "kind"),
    [
        ("fp32", 5e-4, Kind.PASS),
        ("fp32", 2e-3, Kind.FAIL),
        ("bf16", 5e-2, Kind.PASS),
        ("bf16", 0.2, Kind.FAIL),
        ("fp32", float("nan"), Kind.FAIL),
    ],
)
def test_the_engine_answers_a_probe_as_the_actor_does(dtype, apart, kind, judged):
    """Tensors that are all there may be computed with otherwise: the mean difference is held to LGP002's band."""

    def say(stage: Stage) -> None:
        sync(stage, tensors(), tensors())
        sent = [np.linspace(-3.0, -1.0, 63)]
        scored = [sent[0] + apart * np.array([0.5, 1.5, 1.0] * 21)]
        stage.compare("probe_log_probs", sent, "probe", scored, keys=["probe"], entity="param", weights=ENGINE)

    config = {"actor_rollout_ref": {"actor": {"fsdp_config": {"model_dtype": dtype}}}}
    verdict = judged("VER003", say, config)
    assert (verdict.kind, verdict.examined) == (kind, 2)
    assert all(
        (one.key, one.stage, one.field) == ("probe", "weight_sync", "probe_log_probs") for one in verdict.violations
    )
    assert judged("LGP009", say, config).examined == 0  # its probe is a row of the batch, of the actor alone
