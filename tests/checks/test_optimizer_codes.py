"""The ledger's terms and the optimiser's step: what a configuration allows, and what a trace may leave out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lineage import hooks
from lineage.checks import check
from lineage.hooks import LossTerm, Optim, Stage, Weights

ACTOR = "actor_rollout_ref.actor"
Say = Callable[[Stage], None]
# step and severity of each violation
Told = list[tuple[int, str]]


@pytest.fixture
def judged(tmp_path: Path) -> Callable[..., Told]:
    """Record what is said of each step and judge it by one code; step 0 is the ``init`` stage."""

    def _judged(
        code: str, steps: Mapping[int, Say], settings: Mapping[str, Any] | None = None, profile: str = "lineage"
    ) -> Told:
        with hooks.recording(tmp_path, config=nested(settings or {}), profile=profile) as recorder:
            for step, say in steps.items():
                recorder.step(step)
                with recorder.stage("update_actor" if step else "init") as stage:
                    say(stage)
                recorder.seal()
        (verdict,) = check(tmp_path, select=[code]).verdicts
        return [(one.global_steps, one.severity) for one in verdict.violations]

    return _judged


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted settings as a configuration."""
    made: dict[str, Any] = {}
    for name, value in settings.items():
        *folders, last = name.split(".")
        place = made
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = value
    return made


def stepped(lr: float = 1e-3, skipped: bool = False, **attrs: Any) -> Say:
    """One optimiser step; ``rates`` where its groups differ in the learning rate."""
    said = {"lr" if name == "rates" else name: str(value) for name, value in attrs.items()}
    return lambda stage: stage.optim_step(Optim(lr, 0.5, 1.0, skipped), update_index=0, mini_batch=0, attrs=said)


LR = {f"{ACTOR}.optim.lr": 1.0}
WARM = {**LR, f"{ACTOR}.optim.lr_warmup_steps": 4}
COSINE = {
    **LR,
    f"{ACTOR}.optim.lr_scheduler_type": "cosine",
    f"{ACTOR}.optim.min_lr_ratio": 0.2,
    f"{ACTOR}.optim.lr_warmup_steps": 0,
    f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.5,
}
LONG = {"trainer.total_training_steps": 4}


@pytest.mark.parametrize(
    ("settings", "profile", "rates", "wrong"),
    [
        (WARM, "lineage", [0, 0.25, 0.5, 0.75, 1, 1, 0, 0.25], [7, 8]),  # it began again
        (COSINE | LONG, "lineage", [1, 0.882842712474619, 0.6, 0.25], [4]),  # 0 steps of warm-up are none
        # verl leaves them to the ratio; past the end, in steps 6 and 7, trainers differ
        (COSINE | LONG, "verl", [0, 0.5, 1, 0.6, 0.2, 7, 8], []),
        (COSINE, "verl", [5, 6, 7], []),  # how long the run is nobody says
        (WARM | {"trainer.critic_warmup": 3}, "verl", [9, 9, 0, 0.25, 0.25], [5]),  # no actor's update before step 3
        (WARM | {"trainer.v1.trainer_mode": "async"}, "verl", [5, 6], []),
        (WARM | {f"{ACTOR}.optim.lr_scheduler_type": "linear"}, "verl", [5, 6], []),
        (WARM | {f"{ACTOR}.optim.lr_decay_style": "linear"}, "verl", [5, 6], []),  # Megatron's name for it
        (WARM | {f"{ACTOR}.optim.warmup_style": None}, "verl", [0, 0.5], [2]),
        ({}, "lineage", [5, 6], []),
    ],
)
def test_a_learning_rate_is_held_against_a_schedule_that_is_known(
    judged: Callable[..., Told], settings: Mapping[str, Any], profile: str, rates: Sequence[float], wrong: list[int]
) -> None:
    """The rate of every step, from the first."""
    steps = {step: stepped(rate) for step, rate in enumerate(rates, start=1)}
    assert judged("LOS003", steps, settings, profile) == [(step, "error") for step in wrong]


def test_every_group_steps_as_configured(judged: Callable[..., Told]) -> None:
    """One value is that of all groups; where one of several is another, that group is wrong, whichever it is."""
    asked = LR | {f"{ACTOR}.optim.weight_decay": 0.1, f"{ACTOR}.optim.betas": [0.9, 0.99], f"{ACTOR}.optim.eps": 1e-8}
    steps = {
        1: stepped(1.0, weight_decay=0.1, betas="0.9,0.99", eps=1e-08, maximize="false", amsgrad="false"),
        2: stepped(1.0, betas="0.9,0.99;0.9,0.99"),
        3: stepped(1.0, rates="1.0;1.0;10.0"),
        4: stepped(1.0, weight_decay="0.1;0.0"),
        5: stepped(1.0, betas="0.9,0.999;0.9,0.99"),
        6: stepped(1.0, amsgrad="true"),
        7: stepped(1.0, maximize="false;true"),
        8: stepped(1.0),  # another trainer says nothing of it
    }
    assert judged("LOS003", steps, asked) == [(step, "error") for step in (3, 4, 5, 6, 7)]


def loaded(step: int, taken: int) -> Say:
    """A run that goes on from a checkpoint of this step."""
    attrs = {"global_steps": str(step), "optimizer_steps": str(taken)}
    return lambda stage: stage.event("produce", "_load_checkpoint", attrs=attrs)


def test_an_optimiser_counts_on(judged: Callable[..., Told]) -> None:
    """Through skipped steps and past those that are not traced."""
    steps = {
        0: loaded(0, 0),
        1: stepped(optimizer_steps=1, gradient=0.1),
        2: stepped(optimizer_steps=1, skipped=True),
        3: stepped(optimizer_steps=2, skipped=True),  # it was taken
        4: stepped(optimizer_steps=2, gradient="none"),  # the tensor that is watched had none
        5: stepped(optimizer_steps=2),  # it was not taken
        7: stepped(optimizer_steps=9, gradient=0.1),
        8: stepped(optimizer_steps=11, gradient=0.1),
    }
    assert judged("LOS003", steps) == [(3, "error"), (5, "error"), (8, "error")]


@pytest.mark.parametrize(("taken", "wrong"), [(8, []), (1, [(5, "error")])])
def test_an_optimiser_goes_on_after_a_resume(judged: Callable[..., Told], taken: int, wrong: Told) -> None:
    """From the count in the checkpoint."""
    assert judged("LOS003", {0: loaded(4, 7), 5: stepped(optimizer_steps=taken, gradient=0.1)}) == wrong


@pytest.mark.parametrize(("dtype", "wrong"), [("fp16", []), ("fp32", [(1, "error")])])
def test_a_clipped_gradient_is_as_fine_as_its_dtype(judged: Callable[..., Told], dtype: str, wrong: Told) -> None:
    """Near 0 the numbers of float16 are 6e-8 apart, so that what is clipped comes out as another."""

    def say(stage: Stage) -> None:
        attrs = {"gradient_before": "0.0", "gradient_after": "4.172325e-06"}
        term = LossTerm("pg_loss", "token-mean", 1.0, 4.0, 1.0, 1, 4)
        stage.loss(term, update_index=0, mini_batch=0, micro_batch=0, attrs=attrs)
        given = {"gradient": "5.9604645e-08"}
        stage.optim_step(Optim(1e-3, 100.0, 1.0, False), update_index=0, mini_batch=0, attrs=given)

    assert judged("LOS003", {1: say}, {f"{ACTOR}.fsdp_config.model_dtype": dtype}) == wrong


def ledger(*terms: tuple[str, float, float]) -> Say:
    """The ledger of one micro-batch: name, scale and numerator of each term."""

    def say(stage: Stage) -> None:
        for name, scale, numerator in terms:
            term = LossTerm(name, "token-mean", numerator, 4.0, scale, 1, 4)
            stage.loss(term, update_index=0, mini_batch=0, micro_batch=0)

    return say


BONUS = {f"{ACTOR}.entropy_coeff": 0.01, f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.1}
POLICY, ENTROPY, KL, OTHER = ("pg_loss", 1.0, 1.0), ("entropy_loss", -0.01, 2.0), ("kl_loss", 0.1, 0.5), ("z", 1.0, 1.0)


@pytest.mark.parametrize(
    ("profile", "told"),
    [
        ("lineage", [(3, "error"), (4, "error"), (5, "error"), (6, "error")]),
        # another trainer may scale its policy loss for the ranks, and have terms of its own
        ("verl", [(3, "error"), (4, "error")]),
    ],
)
def test_the_ledger_has_the_configured_terms(judged: Callable[..., Told], profile: str, told: Told) -> None:
    """Each with its coefficient, whichever of the two has the sign of the entropy."""
    steps = {
        1: ledger(POLICY, ENTROPY, KL),
        2: ledger(POLICY, ("entropy_loss", 0.01, -2.0), KL),
        7: ledger(POLICY, ("entropy_loss", -0.01, -1e-6), KL),  # of a policy that is certain, as it rounds
        3: ledger(POLICY, ("entropy_loss", 0.01, 2.0), KL),
        4: ledger(POLICY, ENTROPY),
        5: ledger(POLICY, ENTROPY, KL, OTHER),
        6: ledger(("pg_loss", 0.5, 1.0), ENTROPY, KL),
    }
    assert judged("LOS004", steps, BONUS, profile) == told


def bonus(taken: float, *, tokens: int = 4, index: int = 0) -> Say:
    """An entropy of 2 nats a token, measured over 4 tokens, and what an update takes of so many of them."""
    keys = ["a_0_0"]

    def say(stage: Stage) -> None:
        with hooks.recorder().stage("old_log_prob") as old:
            old.produce({"entropy": [np.full(4, 2.0)]}, keys=keys, mask=[np.ones(4, int)], span="response")
        for update in range(index + 1):
            stage.split(keys, mini_batch=0, update_index=update, attrs={"first_update": "0"})
        place = {"mini_batch": 0, "micro_batch": 0, "update_index": index}
        mask = np.arange(4) < tokens
        stage.forward({"entropy_loss": [np.full(4, taken)]}, keys=keys, mask=[mask], span="response", **place)
        stage.loss(LossTerm("entropy_loss", "token-mean", taken * tokens, 4.0, -0.01, 1, tokens), **place)

    return say


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({f"{ACTOR}.fsdp_config.model_dtype": "fp32"}, [2, 3]),
        ({f"{ACTOR}.fsdp_config.model_dtype": "bf16"}, [3]),
        ({"algorithm.rollout_correction.bypass_mode": True}, []),  # nobody has measured the policy
    ],
)
def test_the_entropy_is_what_was_measured_until_the_policy_moves(
    judged: Callable[..., Told], settings: Mapping[str, Any], wrong: list[int]
) -> None:
    """Within what the dtype can tell apart; not of tokens that were rejected since, nor after an update."""
    steps = {1: bonus(2.0), 2: bonus(2.1), 3: bonus(2.9), 4: bonus(2.9, index=1), 5: bonus(2.9, tokens=3)}
    assert judged("LOS005", steps, settings) == [(step, "error") for step in wrong]


@pytest.mark.parametrize(("profile", "severity"), [("lineage", "error"), ("verl", "warning")])
def test_a_trace_may_have_no_whole_ledger(judged: Callable[..., Told], profile: str, severity: str) -> None:
    """A term that nobody ever recorded may be in the loss all the same."""
    assert judged("LOS004", {1: ledger(POLICY)}, BONUS, profile) == [(1, severity)] * 2


def test_a_term_of_weight_0_may_be_there_or_not(judged: Callable[..., Told]) -> None:
    """An entropy that is only logged, a KL whose coefficient is 0."""
    none = {f"{ACTOR}.entropy_coeff": 0, f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.0}
    steps = {1: ledger(POLICY), 2: ledger(POLICY, ("entropy_loss", -0.0, 2.0), ("kl_loss", 0.0, 0.5))}
    assert judged("LOS004", steps, none) == []


def test_a_loop_of_ones_own_has_terms_of_its_own(judged: Callable[..., Told]) -> None:
    """Without a configuration no term is missing and none is too many."""
    assert judged("LOS004", {1: ledger(("ppo", 2.0, 1.0), OTHER)}) == []


def test_a_tensor_may_rest_that_has_no_gradient(judged: Callable[..., Told]) -> None:
    """Others move meanwhile; how small an lr can be seen depends on how near 1 its numbers are."""
    large, expert, norm, gated, left_out = "mlp.weight", "experts.3.weight", "norm.weight", "gated.weight", "out.weight"
    sizes = {large: 2000, expert: 2000, norm: 8, gated: 2000, left_out: 2000}
    weights = {name: np.ones(size, np.float32) for name, size in sizes.items()}
    cases: list[tuple[set[str], float, dict[str, str]]] = [
        (set(), 0.0, {}),
        # 2: an error of what is left out alone: it was seen to have a gradient
        ({gated, left_out}, 1e-3, {"without_gradient": "", "weak_gradient": gated}),
        ({gated}, 1e-3, {"without_gradient": ""}),  # it has never moved, and nobody looked
        ({gated, large}, 1e-6, {"without_gradient": ""}),  # 4: an error, it has moved before
        ({gated, large}, 1e-8, {"without_gradient": ""}),
        ({gated, norm}, 1e-6, {"without_gradient": ""}),
        ({gated, norm}, 1e-3, {"without_gradient": ""}),  # 7: an error
        ({gated, expert}, 1e-3, {"without_gradient": expert}),  # no token chose it
        ({gated, large}, 1e-3, {"without_gradient": large}),  # 9: a warning, no gradient reached it
        ({gated, large}, 1e-3, {}),  # another trainer says nothing of it
    ]

    def begin(stage: Stage) -> None:
        stage.params("produce", weights, weights=Weights(0, "actor"), columns={"status": ["trainable"] * len(sizes)})

    def update(step: int, rest: set[str], lr: float, attrs: dict[str, str]) -> Say:
        def say(stage: Stage) -> None:
            stepped(lr, **attrs)(stage)
            if lr:
                weights.update({name: values + (name not in rest) for name, values in weights.items()})
            stage.params("sync", weights, weights=Weights(step, "actor"))

        return say

    steps = {0: begin} | {step: update(step, *case) for step, case in enumerate(cases, start=1)}
    assert judged("VER006", steps) == [(2, "error"), (4, "error"), (7, "error"), (9, "warning")]


RANK = "actor_rollout_ref.model.lora_rank"


@pytest.mark.parametrize(
    ("settings", "profile", "told"),
    [
        ({RANK: 0}, "lineage", [(0, "error")]),
        ({RANK: 8}, "lineage", []),
        ({}, "lineage", []),  # nobody says that every weight trains
        ({RANK: 0}, "verl", []),  # it has settings of its own for what is frozen
    ],
)
def test_a_parameter_is_frozen_where_somebody_asked_for_it(
    judged: Callable[..., Told], settings: Mapping[str, Any], profile: str, told: Told
) -> None:
    """A table of positions may be frozen by the code of the model, and a buffer neither trains nor is frozen."""
    weights = {
        name: np.ones(4, np.float32) for name in ("embed.weight", "embed_positions.weight", "mlp.weight", "freq")
    }
    status = {"status": ["frozen", "frozen", "trainable", None]}

    def begin(stage: Stage) -> None:
        stage.params("produce", weights, weights=Weights(0, "actor"), columns=status)

    def update(stage: Stage) -> None:
        stepped()(stage)
        moved = {**weights, "mlp.weight": np.full(4, 2, np.float32)}
        stage.params("sync", moved, weights=Weights(1, "actor"))

    assert judged("VER006", {0: begin, 1: update}, settings, profile) == told
