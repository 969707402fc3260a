"""The laws that need a replay: each holds, and each says so when it is broken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lineage import hooks
from lineage.trainer import ppo_loss, training
from lineage.trainer.faults.laws import LAWS
from lineage.trainer.loss import MiniBatch, aggregate
from lineage.trainer.ppo_loss import ppo_loss as real_loss

SLOW = ("resume", "tracing")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in LAWS]
)
def test_a_law_holds(name) -> None:
    assert LAWS[name].says
    assert LAWS[name].broken() == ""


def unmasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is summed over all tokens."""
    monkeypatch.setattr(
        ppo_loss, "aggregate", lambda matrix, mask, *rest: aggregate(matrix, torch.ones_like(mask), *rest)
    )


def own_denominators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each micro-batch divides by its own tokens."""

    def loss(config: Any, rows: Any, mini: MiniBatch, *rest: Any) -> Any:
        return real_loss(config, rows, MiniBatch.of(rows.mask.sum(dim=-1).tolist()), *rest)

    monkeypatch.setattr(training, "ppo_loss", loss)


def noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dropout is left on while scoring."""
    real = training.score_tokens

    def score(*args: Any, **options: Any) -> Any:
        scores = real(*args, **options)
        return replace(scores, log_probs=scores.log_probs + 1e-6 * torch.rand_like(scores.log_probs))

    monkeypatch.setattr(training, "score_tokens", score)


def no_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    """The actor scores at 1, whatever the sampler did."""
    real = training.score_tokens
    monkeypatch.setattr(
        training, "score_tokens", lambda *args, **options: real(*args, **options | {"temperature": 1.0})
    )


def forgotten_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed optimiser begins with empty moments."""
    monkeypatch.setattr(torch.optim.AdamW, "load_state_dict", lambda self, state: None)


def touched_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder normalises what it was only to look at."""
    real = training.TrainingWorker._backward

    def backward(self: Any, *args: Any) -> Any:
        if hooks.recorder().enabled:
            with torch.no_grad():
                next(self.module.parameters()).mul_(1.001)
        return real(self, *args)

    monkeypatch.setattr(training.TrainingWorker, "_backward", backward)


@pytest.mark.parametrize(
    ("name", "harm", "said"),
    [
        ("poison", unmasked, "metric actor/"),
        ("micro_batches", own_denominators, "the loss is divided by"),
        ("repetition", noise, "log_probs: "),
        ("temperature", no_temperature, "those at 1"),
        pytest.param("resume", forgotten_moments, "resumed after step 1", marks=pytest.mark.slow),
        pytest.param("tracing", touched_weights, "traced: ", marks=pytest.mark.slow),
    ],
)
def test_a_broken_law_says_what_differs(name, harm, said, monkeypatch) -> None:
    harm(monkeypatch)
    assert said in LAWS[name].broken()
