"""One model under training or inference: forward passes by micro-batch, the PPO update by mini-batch.

verl's ``TrainingWorker``, on one process that plays every data-parallel rank in turn or on one of several that play one
each (``engine.ranks``): a mini-batch is the union of the ranks' shares, gradients add up over their micro-batches, and
every loss term is divided by the *global* denominator. The update is therefore that of one rank holding all rows,
whatever the number of ranks or the micro-batch size.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lineage import hooks
from lineage.hooks import Optim, Sampling, Topology, Weights
from lineage.trainer.batching.balance import deal_to_score
from lineage.trainer.batching.micro_batches import MicroBatchLimit
from lineage.trainer.engine.ranks import Ranks
from lineage.trainer.engine.sharded import full
from lineage.trainer.engine.ulysses import SequenceParallel
from lineage.trainer.log_prob import RowScores, TokenScores, pad_rows, response_windows, score_tokens
from lineage.trainer.loss import MiniBatch
from lineage.trainer.metrics import mean_metrics
from lineage.trainer.optim import build_optimizer, build_schedule
from lineage.trainer.ppo_loss import MicroLoss, MicroRead, PolicyRows, bypass_metrics, loss_metrics, ppo_loss
from lineage.trainer.protocol import lengths_of, tokens_last
from lineage.trainer.rng import derived_seed
from lineage.trainer.step_watch import StepWatch
from lineage.trainer.update_plan import Place, UpdatePlan
from lineage.trainer.update_rows import MicroRows, PassedBack, Sliced, record_given

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
        """A field padded on the right to its longest row: ``(batch, width)``, or ``(k, batch, width)`` as models take
        positions of k axes.
        """
        return pad_rows(self.columns[name], value)

    def lengths(self, name: str) -> list[int]:
        """Length of each row of a field."""
        return [len(row) for row in self.columns[name]]


def rows_of(nested: Tensor, device: torch.device | str = "cpu") -> list[Tensor]:
    """Rows of a jagged tensor as views of its values (``unbind`` does the same, ten times slower)."""
    return list(nested.values().to(device).split(lengths_of(nested).tolist(), dim=-1 if tokens_last(nested) else 0))


class TrainingWorker:
    """A causal language model with its optimiser.

    Args:
        module: the model; its parameters are trained in place.
        config: ``actor_rollout_ref.actor``.
        topology: parallel layout the engine reports.
        total_training_steps: length of the run, for the schedule.
        pad_token_id: fills ``input_ids`` on the right.
        batches_per_step: updates of a training step, each of which moves the schedule.
        adapter: name of the module's adapter, for the trace; None without one.
        bypass: ``algorithm.rollout_correction`` in bypass mode, else None.
        ranks: the data-parallel group; None plays its ``reported_dp`` ranks in turn.
    """

    def __init__(
        self,
        module: nn.Module,
        config: Any,
        topology: Topology,
        *,
        total_training_steps: int,
        pad_token_id: int,
        batches_per_step: int = 1,
        adapter: str | None = None,
        bypass: Any = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.module = module
        self.config = config
        self.topology = topology
        self.ranks = ranks or Ranks.embedded(topology.reported_dp)
        self.pad_token_id = pad_token_id
        self.adapter = adapter
        self.bypass = bypass
        self.optimizer = build_optimizer(module, config.optim)
        self.scheduler = build_schedule(self.optimizer, config.optim, total_training_steps, batches_per_step)
        self.step_watch = StepWatch(module, self.optimizer, holds=self.ranks.first)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.module.parameters()).device

    def infer_batch(
        self, rows: SequenceRows, *, micro_batches: MicroBatchLimit, temperature: float, with_entropy: bool
    ) -> RowScores:
        """Full-sequence log-probs and entropy of each row, no gradient (see ``log_prob``)."""
        return infer_rows(
            self.module,
            rows,
            micro_batches=micro_batches,
            ranks=self.ranks,
            temperature=temperature,
            with_entropy=with_entropy,
            pad_token_id=self.pad_token_id,
        )

    def train_mini_batch(self, rows: SequenceRows, plan: UpdatePlan) -> dict[str, float]:
        """All epochs and mini-batches of one update, then one step of the schedule.

        Args:
            rows: what the ranks that this process plays hold, in dispatch order and equal parts.

        Returns:
            Metrics, each the mean over the optimiser steps; the same on every rank.
        """
        _refuse_uneven(self.ranks.gathered_from_all(len(rows)))
        self.module.train()
        parts: list[dict[str, float]] = []
        for epoch in range(plan.epochs):
            for index, shares in enumerate(self._mini_batches(len(rows), plan, epoch)):
                place = Place(epoch, index, update_index=plan.first_update + len(parts))
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
        """Row positions of each mini-batch, one list a rank that is played here; every row comes once."""
        ranks, here = self.ranks.size, len(self.ranks.played)
        share, per_mini = rows // here, plan.mini_batch_size // ranks
        if rows % here or plan.mini_batch_size % ranks or share % per_mini:
            raise ValueError(
                f"{rows // here * ranks + rows % here} rows do not divide into mini-batches of {plan.mini_batch_size} "
                f"over {ranks} ranks; the balance stage pads the batch first"
            )
        held = [self._order(at * share, share, plan, epoch, rank) for at, rank in enumerate(self.ranks.played)]
        for start in range(0, share, per_mini):
            yield [rank[start : start + per_mini] for rank in held]

    @staticmethod
    def _order(start: int, share: int, plan: UpdatePlan, epoch: int, rank: int) -> list[int]:
        if plan.shuffle_seed is None:
            return list(range(start, start + share))
        generator = torch.Generator().manual_seed(derived_seed(plan.shuffle_seed, epoch, rank))
        return (torch.randperm(share, generator=generator) + start).tolist()

    def train_batch(self, shares: Sequence[SequenceRows], plan: UpdatePlan, place: Place) -> dict[str, float]:
        """One optimiser step on one mini-batch.

        Args:
            shares: rows of each rank that is played here.
        """
        stage = hooks.current()
        keys = [key for share in shares for key in share.keys]
        told = [(share.tokens, share.lengths("input_ids")) for share in shares]
        everyone = [one for process in self.ranks.gathered(told) for one in process]
        mini = MiniBatch.of(count for tokens, _ in everyone for count in tokens)
        attrs = {**plan.attrs, "global_batch_size": str(plan.mini_batch_size), "dp_size": str(len(everyone))}
        if self.ranks.speaks:
            stage.split(keys, topology=self.topology, attrs=attrs, **place.context(), **self.ranks.place)
        self.optimizer.zero_grad(set_to_none=True)
        self.step_watch.begin()
        micro, done = 0, list[_Done]()
        here = dict(zip(self.ranks.played, shares, strict=False))
        for rank, positions in enumerate(plan.micro_batches.split([lengths for _, lengths in everyone])):
            for part in positions:
                if rank in here:
                    rows = here[rank].select(part)
                    context = {**place.context(), "micro_batch": micro, "coord": self.ranks.coord(rank)}
                    size = plan.micro_batches.attrs(sum(rows.lengths("input_ids")))
                    stage.split(rows.keys, attrs={**attrs, **size}, **context)
                    done.append(self._backward(rows, plan, mini, context))
                micro += 1
        return self._optimizer_step(done, plan, mini, place)

    def _backward(self, rows: SequenceRows, plan: UpdatePlan, mini: MiniBatch, context: dict[str, Any]) -> _Done:
        """Forward and backward of one micro-batch."""
        response_lens = rows.lengths("loss_mask")
        prompt_lens = [all_ - own for all_, own in zip(rows.lengths("input_ids"), response_lens, strict=True)]
        with_entropy = bool(self.config.entropy_coeff)
        scores = _forward(self.module, rows, plan.temperature, with_entropy, self.pad_token_id, self.ranks.sequence)
        entropy = scores.entropy
        inputs = PolicyRows(
            log_prob=response_windows(scores.log_probs, prompt_lens, response_lens),
            old_log_prob=rows.padded("old_log_probs"),
            advantages=rows.padded("advantages"),
            mask=rows.padded("response_mask" if "response_mask" in rows.columns else "loss_mask"),
            entropy=None if entropy is None else response_windows(entropy, prompt_lens, response_lens),
            ref_log_prob=rows.padded("ref_log_prob") if self.config.use_kl_loss else None,
            rollout_is_weights=rows.padded("rollout_is_weights") if "rollout_is_weights" in rows.columns else None,
        )
        tracing = hooks.recorder().tracing
        loss = ppo_loss(self.config, inputs, mini, self.bypass, tracing)
        traced = None
        sequence = self.ranks.sequence
        sliced = Sliced(rows, scores.slices, context, sequence) if tracing and sequence is not None else None
        if tracing and self.ranks.speaks:
            version = plan.version + (context["update_index"] > 0)
            weights = Weights(version, "actor", adapter=self.adapter, training=self.module.training)
            sampling = Sampling(temperature=scores.temperature)
            traced = MicroRows(
                rows, scores.given, inputs.detached(), {**context, "weights": weights, "sampling": sampling}
            )
        value = loss.value
        before = self.step_watch.gradient() if tracing else None
        value.backward()
        passed = PassedBack(value.detach(), before, self.step_watch.gradient() if tracing else None)
        return _Done(context, loss, passed, None if self.bypass is None else inputs.detached(), traced, sliced)

    def _optimizer_step(
        self, done: Sequence[_Done], plan: UpdatePlan, mini: MiniBatch, place: Place
    ) -> dict[str, float]:
        """Clip, step unless the gradient is not finite, and report the mini-batch's terms."""
        clip = self.config.grad_clip
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), clip)
        # one copy to the host for the norm and every term of every micro-batch
        flat = [scalar for micro in done for scalar in (*micro.passed.scalars(), *micro.loss.scalars())]
        grad_norm, *values = torch.stack([full(norm.detach()), *flat]).double().tolist()
        skipped = not math.isfinite(grad_norm) or mini.tokens == 0
        if skipped:
            why = "no token trains" if mini.tokens == 0 else f"gradient norm {grad_norm}"
            step = plan.version + 1
            logger.warning("step %d: optimiser step %d skipped: %s", step, place.update_index, why)
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        stage, host = hooks.current(), iter(values)
        read, passed = list[MicroRead](), list[dict[str, str]]()
        for micro in done:
            passed.append(micro.passed.read(host))
            read.append(micro.loss.read(host))
        for micro in done:
            if micro.traced is not None:
                micro.traced.record(micro.loss)
            if micro.sliced is not None:
                micro.sliced.record()
        for micro, attrs, (terms, watched) in zip(done, passed, read, strict=True):
            for term in terms if self.ranks.speaks else ():
                stage.loss(term, attrs=attrs | micro.loss.attrs(term.term, watched), **micro.context)
        inputs = [micro.inputs.on_host() for micro in done if micro.inputs is not None]
        everyone = self.ranks.gathered_from_all((read, inputs, self.step_watch.norms()))
        told = self.ranks.spoken(everyone)
        if self.ranks.first:
            stage.optim_step(
                Optim(lr=self.step_watch.lr, grad_norm=grad_norm, clip=clip, skipped=skipped),
                attrs=self.step_watch.attrs([norms for _, _, norms in everyone]) if hooks.recorder().tracing else None,
                weights=Weights(plan.version + 1, "actor", adapter=self.adapter, training=True),
                **place.context(),
            )
        metrics = loss_metrics([micro for process, _, _ in told for micro in process])
        if self.bypass is not None:
            metrics |= bypass_metrics([part for _, process, _ in told for part in process], self.bypass)
        if self.config.use_kl_loss:
            metrics["actor/kl_coef"] = self.config.kl_loss_coef
        return {**metrics, "actor/grad_norm": grad_norm, "actor/skipped_steps": float(skipped)}


@dataclass(frozen=True)
class _Done:
    """A micro-batch after its backward pass.

    Attributes:
        passed: what the backward pass began with and what it left.
        inputs: kept where metrics are made of it.
        traced: kept where it is traced, by the process that speaks for its rank.
        sliced: kept where it is traced and its sequences are shared out.
    """

    context: dict[str, Any]
    loss: MicroLoss
    passed: PassedBack
    inputs: PolicyRows | None
    traced: MicroRows | None
    sliced: Sliced | None


@torch.no_grad()
def infer_rows(
    module: nn.Module,
    rows: SequenceRows,
    *,
    micro_batches: MicroBatchLimit,
    ranks: Ranks,
    temperature: float,
    with_entropy: bool,
    pad_token_id: int,
) -> RowScores:
    """Score every row by the micro-batches of each rank; the values come back in the order of the rows.

    Args:
        rows: what the ranks that this process plays hold (``balance.deal_to_score``).
    """
    log_probs: dict[int, Tensor] = {}
    entropy: dict[int, Tensor] = {}
    behind: dict[int, int] = {}
    passes: list[tuple[SequenceRows, Mapping[str, Tensor]]] = []
    slices: list[Sliced] = []
    divided_by, training = None, module.training
    everyone = ranks.gathered_from_all(rows.lengths("input_ids"))
    _refuse_uneven([len(process) for process in everyone])
    held = ranks.spoken(everyone)
    before = sum(map(len, held[: ranks.played[0]]))
    lens = [length for process in held for length in process]
    for rank, number, everywhere in _inference_batches(lens, micro_batches, ranks.size):
        if rank not in ranks.played:
            continue
        places = [place - before for place in everywhere]
        part = rows.select(places)
        lengths = part.lengths("input_ids")
        size = micro_batches.attrs(sum(lengths))
        if size:
            hooks.current().split(part.keys, attrs=size, micro_batch=number, coord=ranks.coord(rank))
        scores = _forward(module, part, temperature, with_entropy, pad_token_id, ranks.sequence)
        divided_by, training = scores.temperature, module.training
        if hooks.recorder().tracing:
            if ranks.speaks:
                passes.append((part, scores.given))
            if ranks.sequence is not None:
                place = {"micro_batch": number, "coord": ranks.coord(rank)}
                slices.append(Sliced(part, scores.slices, place, ranks.sequence))
        behind |= zip(places, range(len(places)), strict=True)
        log_probs |= zip(places, map(_valid, scores.log_probs, lengths), strict=True)
        if scores.entropy is not None:
            entropy |= zip(places, map(_valid, scores.entropy, lengths), strict=True)
    for part, given in passes:  # once all are under way: a copy to the host would make each wait for the one before
        record_given(part, given)
    for cut in slices:
        cut.record()
    order = sorted(log_probs)
    known = [entropy[row] for row in sorted(entropy)]
    return RowScores([log_probs[row] for row in order], known, [behind[row] for row in order], divided_by, training)


def _refuse_uneven(rows: Sequence[int]) -> None:
    """Of processes with unlike many rows some would wait in a collective that the others never enter."""
    if len(set(rows)) > 1:
        raise ValueError(
            f"the ranks were handed {', '.join(map(str, rows))} rows; the balance stage pads the batch first"
        )


def _inference_batches(
    seq_lens: list[int], micro_batches: MicroBatchLimit, ranks: int
) -> Iterator[tuple[int, int, list[int]]]:
    """Rank, number and row positions of each forward pass; a rank has a contiguous part of the rows, as dispatched."""
    dealt = deal_to_score(len(seq_lens), ranks)
    number = 0
    for rank, parts in enumerate(micro_batches.split([[seq_lens[row] for row in share] for share in dealt])):
        for part in parts:
            yield rank, number, [dealt[rank][place] for place in part]
            number += 1


def _valid(row: Tensor, length: int) -> Tensor:
    """A row without its padding; its last position predicts only padding, which is nothing: 0."""
    row = row[:length].clone()
    row[length - 1] = 0.0
    return row


def _forward(
    module: nn.Module,
    rows: SequenceRows,
    temperature: float,
    with_entropy: bool,
    pad_token_id: int,
    sequence: SequenceParallel | None,
) -> TokenScores:
    """Score rows padded to one width."""
    ids, attention = rows.padded("input_ids", pad_token_id), rows.padded("attention_mask")
    positions = rows.padded("position_ids")
    by_row = positions.transpose(0, 1) if positions.dim() == 3 else positions
    scores = score_tokens(
        module, ids, attention, positions, temperature=temperature, with_entropy=with_entropy, sequence=sequence
    )
    return replace(scores, given={"input_ids": ids, "attention_mask": attention, "position_ids": by_row})
