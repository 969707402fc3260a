"""Faults of log-probs: of another temperature, of other positions, in fewer bits, by another author."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lineage import hooks
from lineage.trainer.actor import fetch
from lineage.trainer.faults.registry import Seams, fault
from lineage.trainer.faults.seams import TRAJECTORY_FIELDS
from lineage.trainer.log_prob import RowScores, TokenScores
from lineage.trainer.loss import PolicyLoss
from lineage.trainer.protocol import KVBatchMeta, nested_from_list
from lineage.trainer.rollout.sampling import Drawn
from lineage.trainer.stages.fields import put
from lineage.trainer.training import rows_of

DECODE = "lineage.trainer.rollout.hf.decode"
FORWARD = "lineage.trainer.training._forward"
SCORE, SCORE_TOKENS = "lineage.trainer.log_prob._score", "lineage.trainer.training.score_tokens"
PUT = "lineage.trainer.stages.log_prob.put"
COOL, CUT = "actor_rollout_ref.rollout.temperature=0.7", "actor_rollout_ref.rollout.top_p=0.9"
EPOCHS = "actor_rollout_ref.actor.ppo_epochs=2"


def sampled(change: Callable[[Tensor], Tensor], rows: slice = slice(None)) -> Seams:
    """The sampler's log-probs, changed in these rows of a batch; ``change`` takes ``(response_len,)`` float32."""

    def decode(original: Any, *args: Any, **options: Any) -> Drawn:
        drawn: Drawn = original(*args, **options)
        scores = list(drawn.log_probs)
        for row in range(len(scores))[rows]:
            scores[row] = change(torch.tensor(scores[row])).tolist()
        return replace(drawn, log_probs=scores)

    return {DECODE: decode}


def anchored(change: Callable[[list[Tensor]], list[Tensor]]) -> Seams:
    """``old_log_probs`` as they are written, changed: ``change`` takes a row's values each."""

    def write(original: Any, parts: Any, batch: KVBatchMeta, columns: dict[str, Tensor]) -> None:
        if "old_log_probs" in columns:
            columns = {**columns, "old_log_probs": nested_from_list(change(rows_of(columns["old_log_probs"])))}
        original(parts, batch, columns)

    return {PUT: write}


def tempered(stage: str, temperature: float) -> Seams:
    """Forward passes of one stage that are given a temperature of their own."""

    def forward(original: Any, module: Any, rows: Any, asked: float, *rest: Any) -> TokenScores:
        given = temperature if hooks.current().name == stage else asked
        scores: TokenScores = original(module, rows, given, *rest)
        return scores

    return {FORWARD: forward}


def spoilt(stage: str, value: float) -> Seams:
    """Forward passes of one stage, the first of whose rows has ``value`` on its last tokens."""

    def forward(original: Any, *args: Any) -> TokenScores:
        scores: TokenScores = original(*args)
        if hooks.current().name == stage:
            end = len(args[1].columns["input_ids"][0]) - 1
            scores.log_probs[0, end - 2 : end] = value
        return scores

    return {FORWARD: forward}


# --------------------------------------------------------------------------------------------------------- LGP001


@fault("LGP001", "rollout")
def probabilities_for_log_probs() -> Seams:
    """The engine's answer holds probabilities, and nobody takes their logarithm."""
    return sampled(torch.exp)


@fault("LGP001", "rollout", CUT)
def positive_log_probs() -> Seams:
    """The engine returns negative log-likelihoods, which are stored as log-probs."""
    return sampled(torch.neg)


@fault("LGP001", "rollout", CUT)
def placeholder_log_probs() -> Seams:
    """The engine was not asked for log-probs, and zeros stand where they belong."""
    return sampled(torch.zeros_like)


@fault("LGP001", "ref_log_prob", reports=["vllm-prompt-logprobs-uninitialised", "trl-nan-sampler-logprob"])
def buffer_not_filled() -> Seams:
    """A buffer of log-probs is not written where a cache spared the work, and is read: here it held no number."""
    return spoilt("ref_log_prob", float("nan"))


@fault("LGP001", "old_log_prob")
def infinite_old_log_prob() -> Seams:
    """The last tokens' old log-probs are minus infinity: they lay outside a support that the trainer cut too."""
    return spoilt("old_log_prob", -float("inf"))


@fault("LGP001", "rollout", "+experiment=tools", "data.max_response_length=128")
def observations_have_log_probs() -> Seams:
    """The tokens of a tool's answer are given a log-prob, as if the policy had drawn them."""

    def write(original: Any, *args: Any) -> Any:
        fields = original(*args)
        pairs = zip(rows_of(fields["rollout_log_probs"]), rows_of(fields["response_mask"]), strict=True)
        fields["rollout_log_probs"] = nested_from_list(
            [torch.where(mask.bool(), row, torch.full_like(row, -1.0)) for row, mask in pairs]
        )
        return fields

    return {TRAJECTORY_FIELDS: write}


# --------------------------------------------------------------------------------------------------------- LGP002


@fault("LGP002", "old_log_prob", COOL, reports=["prime-logprob-divided-by-temperature"])
def sampler_divides_log_probs() -> Seams:
    """The sampler divides its log-probs by the temperature instead of the logits."""
    return sampled(lambda scores: scores / 0.7)


@fault("LGP002", "old_log_prob", COOL, reports=["verl-pearson-metric-scaled-vs-raw", "nemo-temperature"])
def sampler_log_probs_are_raw() -> Seams:
    """The engine returns log-probs of before the temperature, and says that they are of after it."""

    def draw(original: Any, logits: Tensor, params: Any, uniform: Tensor) -> tuple[Tensor, Tensor]:
        tokens, _ = original(logits, params, uniform)
        return tokens, logits.log_softmax(dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    return {"lineage.trainer.rollout.sampling.draw": draw}


@fault("LGP002", "old_log_prob", "actor_rollout_ref.rollout.temperature=0.1", reports=["oi-bf16-lm-head"])
def sampler_head_in_bfloat16() -> Seams:
    """The sampler's head computes in bfloat16, the trainer's in float32."""

    def draw(original: Any, logits: Tensor, params: Any, uniform: Tensor) -> tuple[Tensor, Tensor]:
        tokens, scores = original(logits.bfloat16().float(), params, uniform)
        return tokens, scores

    return {"lineage.trainer.rollout.sampling.draw": draw}


@fault("LGP002", "old_log_prob", reports=["verl-old-logprob-not-equal-first-update"])
def one_session_scored_by_others() -> Seams:
    """One session's log-probs come from another pass over its answer: each is off by 0.05, up or down."""
    return sampled(lambda scores: scores + 0.05 * torch.linspace(-1.0, 1.0, len(scores)).sign(), slice(2, 3))


# --------------------------------------------------------------------------------------------------------- LGP003


@fault("LGP003", "old_log_prob", CUT)
def sampler_log_probs_one_token_late() -> Seams:
    """The sampler stores under each token the log-prob of the one before it."""
    return sampled(lambda scores: scores.roll(1))


@fault("LGP003", "old_log_prob", reports=["trl-logit-slice-whole-sequence"])
def sampler_log_probs_one_token_early() -> Seams:
    """The first logits of a response are dropped, not the last: each token has the log-prob of the next."""
    return sampled(lambda scores: scores.roll(-1))


@fault("LGP003", "old_log_prob", "trace.probe=0")
def trainer_shifts_once_more() -> Seams:
    """Every forward pass of the trainer shifts its log-probs by one position more, and all of them agree."""

    def forward(original: Any, *args: Any) -> TokenScores:
        scores: TokenScores = original(*args)
        return replace(scores, log_probs=scores.log_probs.roll(1, dims=-1))

    return {FORWARD: forward}


# ------------------------------------------------------------------------------------------------- LEN004, VER004


def _next_of_its_length(rows: list[Tensor]) -> list[Tensor]:
    """Each row's values replaced by those of the next row of the same length."""
    moved = list(rows)
    for size in {len(row) for row in rows}:
        places = [place for place, row in enumerate(rows) if len(row) == size]
        for place, other in zip(places, [*places[1:], places[0]], strict=True):
            moved[place] = rows[other]
    return moved


@fault("LEN004", "old_log_prob")
def old_log_probs_of_the_next_row() -> Seams:
    """Rows are scored sorted by length and put back by a rank that is not stable: each has the next one's log-probs."""
    return anchored(_next_of_its_length)


@fault("LEN004", "ref_log_prob")
def reference_of_the_next_row() -> Seams:
    """What the reference said of the rows of one length is written back one row off."""

    def write(original: Any, parts: Any, batch: KVBatchMeta, columns: dict[str, Tensor]) -> None:
        if "ref_log_prob" in columns:
            moved = _next_of_its_length(rows_of(columns["ref_log_prob"]))
            columns = {**columns, "ref_log_prob": nested_from_list(moved)}
        original(parts, batch, columns)

    return {PUT: write}


@fault("LEN004", "old_log_prob")
def rolled_after_the_cut() -> Seams:
    """The window is right, and then its values are rolled by a token to meet tokens they had met already."""
    return anchored(lambda rows: [row.roll(1) for row in rows])


@fault("VER004", "old_log_prob")
def anchor_of_a_copy_that_decays() -> Seams:
    """Old log-probs are made by a copy of the actor that a decay of its own has shrunk; it says the same version."""
    return scored_by(lambda weight: weight * 0.97)


@fault("VER004", "old_log_prob", "trace.probe=0")
def anchor_of_weights_in_fewer_bits() -> Seams:
    """Old log-probs are made by a quantised copy of the actor: sampler and update are of the weights themselves."""
    return scored_by(lambda weight: (weight * 8).round() / 8)


def scored_by(change: Callable[[Tensor], Tensor]) -> Seams:
    """Old log-probs by the actor with changed weights."""

    def compute(original: Any, worker: Any, batch: KVBatchMeta) -> Any:
        module = worker.policy.module
        kept = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        module.load_state_dict({name: change(tensor) for name, tensor in kept.items()})
        try:
            return original(worker, batch)
        finally:
            module.load_state_dict(kept)

    return {"lineage.trainer.actor.ActorRolloutRefWorker.compute_log_prob": compute}


# --------------------------------------------------------------------------------------------------------- LGP004


@fault("LGP004", "old_log_prob", "+experiment=bypass")
def bypass_clamps_its_anchor() -> Seams:
    """On their way to be the anchor the sampler's log-probs are cut from below."""
    return anchored(lambda rows: [row.clamp(min=-4.6) for row in rows])


@fault("LGP004", "old_log_prob")
def sampler_stands_for_the_actor() -> Seams:
    """The bypass reaches the old log-probs and not the loss: the actor never scores its batch."""

    def compute(original: Any, parts: Any, batch: KVBatchMeta) -> dict[str, float]:
        with hooks.traced("old_log_prob", component="PPOTrainer._compute_old_log_prob"):
            data = fetch(parts.queue, batch, ["rollout_log_probs"])
            put(parts, batch, {"old_log_probs": data["rollout_log_probs"]})
        return {}

    return {"lineage.trainer.grpo.compute_old_log_prob": compute}


# --------------------------------------------------------------------------------------------------------- LGP005


@fault("LGP005", "old_log_prob", COOL, reports=["trl-temperature-not-applied", "verl-megatron-temperature-missing"])
def old_log_probs_without_temperature() -> Seams:
    """The pass that makes the old log-probs does not get the sampler's temperature."""
    return tempered("old_log_prob", 1.0)


@fault("LGP005", "ref_log_prob", COOL, reports=["slime-teacher-logprobs-temperature-zero"])
def reference_at_another_temperature() -> Seams:
    """The reference scores at a temperature of its own, which is hard-coded."""
    return tempered("ref_log_prob", 0.01)


@fault("LGP005", "update_actor", COOL)
def update_without_temperature() -> Seams:
    """Old and reference log-probs are tempered, those of the update are not."""
    return tempered("update_actor", 1.0)


@fault("LGP005", "old_log_prob", reports=["verl-eval-mode-missing"])
def scored_in_training_mode() -> Seams:
    """The module stays in training mode while it makes the old log-probs."""

    def infer(original: Any, worker: Any, *args: Any, **options: Any) -> Any:
        worker.module.train()
        try:
            return original(worker, *args, **options)
        finally:
            worker.module.eval()

    return {"lineage.trainer.training.TrainingWorker.infer_batch": infer}


# ------------------------------------------------------------------------------------------------- LGP007, LGP008


@fault("LGP007", "rollout", CUT, reports=["slime-rollout-logprob-bf16"])
def sampler_log_probs_in_bfloat16() -> Seams:
    """The sampler's log-probs pass through bfloat16 on their way to the batch."""
    return sampled(lambda scores: scores.bfloat16().float())


@fault("LGP008", "update_actor", EPOCHS, reports=["forge-ratio-constant-one"])
def anchor_of_every_update() -> Seams:
    """Each update takes its own log-probs, detached, for the old ones: the ratio is 1 in every epoch."""

    def rows(original: Any, **inputs: Any) -> Any:
        return original(**{**inputs, "old_log_prob": inputs["log_prob"].detach()})

    return {"lineage.trainer.training.PolicyRows": rows}


@fault("LGP008", "update_actor", EPOCHS)
def anchor_forgotten_in_the_loss() -> Seams:
    """The update logs its ratio to the old log-probs, and its loss takes another, to the current ones."""

    def policy_loss(original: Any, log_prob: Tensor, old_log_prob: Tensor, *rest: Any, **options: Any) -> PolicyLoss:
        made: PolicyLoss = original(log_prob, log_prob.detach(), *rest, **options)
        return replace(made, log_ratio=log_prob - old_log_prob)

    return {"lineage.trainer.ppo_loss.compute_policy_loss": policy_loss}


# --------------------------------------------------------------------------------------------------------- LGP009


@fault("LGP009", "old_log_prob", reports=["prime-packed-logprob-length"])
def shifted_once_a_pack() -> Seams:
    """Log-probs are shifted against their tokens once for a pack, not once for each row: later rows are further off."""

    def infer(original: Any, *args: Any, **options: Any) -> RowScores:
        scores: RowScores = original(*args, **options)
        shifted = [
            row.roll(-before) if hooks.current().name == "old_log_prob" else row
            for row, before in zip(scores.log_probs, scores.behind, strict=True)
        ]
        return replace(scores, log_probs=shifted)

    return {"lineage.trainer.training.infer_rows": infer}


@fault("LGP009", "old_log_prob")
def positions_begin_anew() -> Seams:
    """The model numbers positions itself, by blocks: they begin anew in the middle of a row."""

    def score(
        original: Any, module: Any, ids: Tensor, attention: Tensor, positions: Tensor, **options: Any
    ) -> TokenScores:
        scores: TokenScores = original(module, ids, attention, positions % 16, **options)
        return scores

    return {SCORE_TOKENS: score}


@fault(
    "LGP009",
    "old_log_prob",
    "actor_rollout_ref.rollout.temperature=0.3",
    reports=["openrlhf-entropy-before-temperature"],
)
def entropy_before_temperature() -> Seams:
    """The entropy is taken of the logits as they come, the log-probs of those divided by the temperature."""

    def score(original: Any, logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool) -> Any:
        log_probs, _ = original(logits, labels, temperature, False)
        return log_probs, original(logits, labels, 1.0, True)[1] if with_entropy else None

    return {SCORE: score}


@fault("LGP009", "old_log_prob", "actor_rollout_ref.rollout.temperature=0.1", reports=["slime-logprob-under-autocast"])
def log_softmax_under_autocast() -> Seams:
    """The trainer's log-softmax runs inside the autocast region: in bfloat16."""

    def score(original: Any, logits: Tensor, *rest: Any) -> Any:
        return original(logits.bfloat16(), *rest)

    return {SCORE: score}


@fault("LGP009", "old_log_prob", COOL)
def temperature_applied_twice() -> Seams:
    """The logits come out of the model tempered, and the trainer tempers them once more."""

    def score(original: Any, logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool) -> Any:
        return original(logits / temperature, labels, temperature, with_entropy)

    return {SCORE: score}


@fault("LGP009", "old_log_prob")
def logits_of_the_tokens_own_position() -> Seams:
    """Each token is scored by the logits at its own position, which have seen it."""

    def score(original: Any, logits: Tensor, labels: Tensor, *rest: Any) -> Any:
        return original(logits.roll(-1, dims=-2), labels, *rest)

    return {SCORE: score}
