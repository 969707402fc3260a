"""One model under training or inference: forward passes by micro-batch, the PPO update by mini-batch.

verl's ``TrainingWorker`` on one process that plays every data-parallel rank in turn: a mini-batch is the union of the
ranks' shares, gradients add up over their micro-batches, and every loss term is divided by the *global* denominator.
The update is therefore that of one rank holding all rows, whatever the number of ranks or the micro-batch size.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lineage import hooks
from lineage.hooks import LossTerm, Optim, Topology, Weights
from lineage.trainer.log_prob import TokenScores, pad_rows, response_windows, score_tokens
from lineage.trainer.loss import Aggregated, MiniBatch, aggregate, compute_policy_loss, kl_penalty
from lineage.trainer.metrics import mean_metrics
from lineage.trainer.optim import build_optimizer, build_schedule
from lineage.trainer.protocol import lengths_of, padded_to_nested

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SequenceRows:
    """Whole sequences of a batch, one tensor a row.

    Attributes:
        columns: field name to its rows; ``input_ids attention_mask position_ids`` at sequence span, others at response
            span.
        tokens: tokens each row trains, ``loss_mask.sum()``, counted on the host; 0 where the batch has no such mask.
    """

    keys: list[str]
    columns: dict[str, list[Tensor]]
    tokens: list[int]

    @classmethod
    def from_tensordict(cls, keys: Sequence[str], data: TensorDict, device: torch.device) -> SequenceRows:
        """Rows of the jagged fields of a batch, on the device of the model."""
        columns = {name: rows_of(data[name], device) for name in data.keys()}  # noqa: SIM118
        masks = rows_of(data["loss_mask"]) if "loss_mask" in columns else None
        tokens = [0] * len(keys) if masks is None else [int(mask.sum()) for mask in masks]
        return cls(list(keys), columns, tokens)

    def __len__(self) -> int:
        return len(self.keys)

    def select(self, rows: Sequence[int]) -> SequenceRows:
        """These rows, in this order."""
        columns = {name: [column[row] for row in rows] for name, column in self.columns.items()}
        return SequenceRows([self.keys[row] for row in rows], columns, [self.tokens[row] for row in rows])

    def padded(self, name: str, value: float = 0) -> Tensor:
        """A field padded on the right to its longest row."""
        return pad_rows(self.columns[name], value)

    def lengths(self, name: str) -> list[int]:
        """Length of each row of a field."""
        return [len(row) for row in self.columns[name]]


def rows_of(nested: Tensor, device: torch.device | str = "cpu") -> list[Tensor]:
    """Rows of a jagged tensor as views of its values (``unbind`` does the same, ten times slower)."""
    return list(nested.values().to(device).split(lengths_of(nested).tolist()))


@dataclass(frozen=True)
class UpdatePlan:
    """How one ``update_actor`` walks over its batch (the batch's ``extra_info``).

    Attributes:
        mini_batch_size: rows of a mini-batch over all ranks: M x G.
        micro_batch_size: rows of one forward pass; None takes a rank's whole share.
        epochs: passes over the batch.
        temperature: the sampler's.
        shuffle_seed: seed of the order of rows inside each rank, None keeps the order.
        version: version of the weights before the update.
    """

    mini_batch_size: int
    micro_batch_size: int | None
    epochs: int
    temperature: float
    shuffle_seed: int | None
    version: int


@dataclass(frozen=True)
class Place:
    """Where in the update a mini-batch or micro-batch stands."""

    ppo_epoch: int
    mini_batch: int
    update_index: int

    def context(self) -> dict[str, int]:
        """As context columns of a trace row."""
        return {"ppo_epoch": self.ppo_epoch, "mini_batch": self.mini_batch, "update_index": self.update_index}


class TrainingWorker:
    """A causal language model with its optimiser.

    Args:
        module: the model; its parameters are trained in place.
        config: ``actor_rollout_ref.actor``.
        topology: parallel layout the engine reports; its ``reported_dp`` ranks are played in turn.
        total_training_steps: length of the run, for the schedule.
        pad_token_id: fills ``input_ids`` on the right.
    """

    def __init__(
        self, module: nn.Module, config: Any, topology: Topology, *, total_training_steps: int, pad_token_id: int
    ) -> None:
        self.module = module
        self.config = config
        self.topology = topology
        self.pad_token_id = pad_token_id
        self.optimizer = build_optimizer(module, config.optim)
        self.scheduler = build_schedule(self.optimizer, config.optim, total_training_steps)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.module.parameters()).device

    def infer_batch(
        self, rows: SequenceRows, *, micro_batch_size: int | None, temperature: float, with_entropy: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Full-sequence log-probs and entropy of each row, no gradient (see ``log_prob``)."""
        return infer_rows(
            self.module,
            rows,
            micro_batch_size=micro_batch_size,
            temperature=temperature,
            with_entropy=with_entropy,
            pad_token_id=self.pad_token_id,
        )

    def train_mini_batch(self, rows: SequenceRows, plan: UpdatePlan) -> dict[str, float]:
        """All epochs and mini-batches of one update, then one step of the schedule.

        Args:
            rows: the batch in dispatch order; rank ``r`` holds its ``r``-th contiguous part.

        Returns:
            Metrics, each the mean over the optimiser steps.
        """
        self.module.train()
        parts: list[dict[str, float]] = []
        for epoch in range(plan.epochs):
            for index, shares in enumerate(self._mini_batches(len(rows), plan, epoch)):
                place = Place(epoch, index, update_index=len(parts))
                parts.append(self.train_batch([rows.select(share) for share in shares], plan, place))
        self.module.eval()
        metrics = mean_metrics(parts)
        metrics["actor/lr"] = float(self.optimizer.param_groups[0]["lr"])
        metrics["actor/skipped_steps"] = sum(part["actor/skipped_steps"] for part in parts)
        with warnings.catch_warnings():
            # It counts training steps, so it moves even when every optimiser step was skipped, to which torch objects.
            warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler\.step\(\)` before")
            self.scheduler.step()
        return metrics

    def _mini_batches(self, rows: int, plan: UpdatePlan, epoch: int) -> Iterator[list[list[int]]]:
        """Row positions of each mini-batch, one list a rank; every row comes once."""
        ranks = self.topology.reported_dp
        share, per_mini = rows // ranks, plan.mini_batch_size // ranks
        if rows % ranks or plan.mini_batch_size % ranks or share % per_mini:
            raise ValueError(
                f"{rows} rows do not divide into mini-batches of {plan.mini_batch_size} over {ranks} ranks; "
                "the balance stage pads the batch first"
            )
        held = [self._order(rank * share, share, plan, epoch, rank) for rank in range(ranks)]
        for start in range(0, share, per_mini):
            yield [rank[start : start + per_mini] for rank in held]

    @staticmethod
    def _order(start: int, share: int, plan: UpdatePlan, epoch: int, rank: int) -> list[int]:
        if plan.shuffle_seed is None:
            return list(range(start, start + share))
        generator = torch.Generator().manual_seed(plan.shuffle_seed * 1_000_003 + epoch * 1009 + rank)
        return (torch.randperm(share, generator=generator) + start).tolist()

    def train_batch(self, shares: Sequence[SequenceRows], plan: UpdatePlan, place: Place) -> dict[str, float]:
        """One optimiser step on one mini-batch.

        Args:
            shares: rows of each rank.
        """
        stage = hooks.current()
        keys = [key for share in shares for key in share.keys]
        mini = MiniBatch(rows=len(keys), tokens=sum(sum(share.tokens) for share in shares))
        attrs = {"global_batch_size": str(plan.mini_batch_size), "dp_size": str(len(shares))}
        stage.split(keys, topology=self.topology, attrs=attrs, **place.context())
        self.optimizer.zero_grad(set_to_none=True)
        micro, done = 0, []
        for rank, share in enumerate(shares):
            size = plan.micro_batch_size or len(share)
            for start in range(0, len(share), size):
                rows = share.select(range(start, min(start + size, len(share))))
                context = {**place.context(), "micro_batch": micro, "coord": {"dp": rank}}
                stage.split(rows.keys, attrs=attrs, **context)
                done.append((context, rows, self._backward(rows, plan, mini, context)))
                micro += 1
        return self._optimizer_step(done, plan, mini, place)

    def _backward(
        self, rows: SequenceRows, plan: UpdatePlan, mini: MiniBatch, context: dict[str, Any]
    ) -> dict[str, tuple[float, Aggregated]]:
        """Forward and backward of one micro-batch; returns its terms by name with the scale of each in the loss."""
        config, mask = self.config, rows.padded("loss_mask")
        response_lens = rows.lengths("loss_mask")
        prompt_lens = [all_ - own for all_, own in zip(rows.lengths("input_ids"), response_lens, strict=True)]
        scores = _forward(self.module, rows, plan.temperature, bool(config.entropy_coeff), self.pad_token_id)
        log_prob = response_windows(scores.log_probs, prompt_lens, response_lens)
        old_log_prob = rows.padded("old_log_probs")
        _record_forward(rows, log_prob, old_log_prob, mask, response_lens, context, plan.version)
        policy = compute_policy_loss(
            log_prob,
            old_log_prob,
            rows.padded("advantages"),
            clip_ratio_low=config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low,
            clip_ratio_high=config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high,
            clip_ratio_c=config.clip_ratio_c,
        )

        def total(matrix: Tensor) -> Aggregated:
            return aggregate(matrix, mask, config.loss_agg_mode, mini)

        terms = {"pg_loss": (1.0, total(policy.loss))}
        if scores.entropy is not None:
            entropy = response_windows(scores.entropy, prompt_lens, response_lens)
            terms["entropy_loss"] = (-config.entropy_coeff, total(entropy))
        if config.use_kl_loss:
            kl = kl_penalty(log_prob, rows.padded("ref_log_prob"), config.kl_loss_type)
            terms["kl_loss"] = (config.kl_loss_coef, total(kl))
        loss: Tensor = sum((scale * term.value for scale, term in terms.values()), torch.zeros((), device=mask.device))
        loss.backward()
        with torch.no_grad():
            watched = {
                "pg_clipfrac": policy.clipped,
                "pg_clipfrac_lower": policy.clipped_lower,
                "ppo_kl": -policy.log_ratio,
            }
            token_mean = {name: aggregate(matrix, mask, "token-mean", mini) for name, matrix in watched.items()}
        return {**terms, **{name: (0.0, value) for name, value in token_mean.items()}}

    def _optimizer_step(
        self,
        done: Sequence[tuple[dict[str, Any], SequenceRows, dict[str, tuple[float, Aggregated]]]],
        plan: UpdatePlan,
        mini: MiniBatch,
        place: Place,
    ) -> dict[str, float]:
        """Clip, step unless the gradient is not finite, and report the mini-batch's terms."""
        clip = self.config.grad_clip
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), clip)
        # one copy to the host for the norm and every term of every micro-batch
        flat = [term.numerator.detach() for _, _, terms in done for _, term in terms.values()]
        grad_norm, *numerators = torch.stack([norm.detach(), *flat]).double().tolist()
        skipped = not math.isfinite(grad_norm) or mini.tokens == 0
        if skipped:
            why = "no token trains" if mini.tokens == 0 else f"gradient norm {grad_norm}"
            logger.warning("optimiser step %d skipped: %s", place.update_index, why)
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        stage, totals, values = hooks.current(), dict[str, float](), iter(numerators)
        for context, rows, terms in done:
            for name, (scale, term) in terms.items():
                numerator = next(values)
                totals[name] = totals.get(name, 0.0) + numerator / term.denominator
                if scale:
                    mode = self.config.loss_agg_mode
                    entry = LossTerm(name, mode, numerator, term.denominator, scale, len(rows), sum(rows.tokens))
                    stage.loss(entry, **context)
        lr = float(self.optimizer.param_groups[0]["lr"])
        stage.optim_step(
            Optim(lr=lr, grad_norm=grad_norm, clip=clip, skipped=skipped),
            weights=Weights(plan.version + 1, "actor", training=True),
            **place.context(),
        )
        metrics = {f"actor/{name}": value for name, value in totals.items()}
        return {**metrics, "actor/grad_norm": grad_norm, "actor/skipped_steps": float(skipped)}


@torch.no_grad()
def infer_rows(
    module: nn.Module,
    rows: SequenceRows,
    *,
    micro_batch_size: int | None,
    temperature: float,
    with_entropy: bool,
    pad_token_id: int,
) -> tuple[list[Tensor], list[Tensor]]:
    """Score every row by micro-batches; entropy is an empty list when it was not asked for."""
    log_probs: list[Tensor] = []
    entropy: list[Tensor] = []
    size = micro_batch_size or max(len(rows), 1)
    for start in range(0, len(rows), size):
        part = rows.select(range(start, min(start + size, len(rows))))
        scores = _forward(module, part, temperature, with_entropy, pad_token_id)
        lengths = part.lengths("input_ids")
        log_probs += [_valid(row, length) for row, length in zip(scores.log_probs, lengths, strict=True)]
        if scores.entropy is not None:
            entropy += [_valid(row, length) for row, length in zip(scores.entropy, lengths, strict=True)]
    return log_probs, entropy


def _valid(row: Tensor, length: int) -> Tensor:
    """A row without its padding; its last position predicts only padding, which is nothing: 0."""
    row = row[:length].clone()
    row[length - 1] = 0.0
    return row


def _forward(
    module: nn.Module, rows: SequenceRows, temperature: float, with_entropy: bool, pad_token_id: int
) -> TokenScores:
    return score_tokens(
        module,
        rows.padded("input_ids", pad_token_id),
        rows.padded("attention_mask"),
        rows.padded("position_ids"),
        temperature=temperature,
        with_entropy=with_entropy,
    )


def _record_forward(
    rows: SequenceRows,
    log_prob: Tensor,
    old_log_prob: Tensor,
    mask: Tensor,
    response_lens: list[int],
    context: dict[str, Any],
    version: int,
) -> None:
    """Trace the policy's log-probs; before the first optimiser step they are the old ones computed again."""
    if not hooks.recorder().enabled:
        return
    stage, lengths = hooks.current(), torch.tensor(response_lens, device=mask.device)
    seen = padded_to_nested(log_prob.detach(), lengths)
    nested_mask = padded_to_nested(mask, lengths)
    at = Weights(version if context["update_index"] == 0 else version + 1, "actor", training=True)
    context = {**context, "weights": at, "span": "response"}
    stage.forward({"log_probs": seen}, keys=rows.keys, mask=nested_mask, **context)
    if context["update_index"] == 0:
        old = padded_to_nested(old_log_prob, lengths)
        stage.compare("log_probs", seen, "old_log_probs", old, mask=nested_mask, keys=rows.keys, **context)
