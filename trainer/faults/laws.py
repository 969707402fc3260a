"""Laws of the trainer that no single trace can show: the same work done twice, in another way, must end the same.

A law is a function that does both and says in a sentence what differs; nothing, when it holds.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from lineage import hooks
from lineage.trainer.advantage import compute_advantage
from lineage.trainer.batching.micro_batches import MicroBatchLimit
from lineage.trainer.config import adapt_to_mode, compose, validate_config
from lineage.trainer.config.actor_rollout_ref import ActorConfig
from lineage.trainer.config.ppo_trainer import RolloutCorrectionConfig
from lineage.trainer.correction.rollout_correction import compute_rollout_correction
from lineage.trainer.engine.topology import embedded_topology
from lineage.trainer.faults import lab
from lineage.trainer.grpo import PPOTrainerSync
from lineage.trainer.kl_control import KLController, apply_kl_penalty
from lineage.trainer.metrics import DataRows, compute_data_metrics, compute_rollout_metrics
from lineage.trainer.models import find_model, load_model
from lineage.trainer.setup import use_few_threads
from lineage.trainer.training import SequenceRows, TrainingWorker
from lineage.trainer.update_plan import UpdatePlan


@dataclass(frozen=True)
class Law:
    """One law.

    Attributes:
        name: the function that tries it.
        says: what must hold.
        broken: tries it; a sentence on what differs, empty when it holds.
    """

    name: str
    says: str
    broken: Callable[[], str]


LAWS: dict[str, Law] = {}


def law(broken: Callable[[], str]) -> Callable[[], str]:
    """Register a function as a law; its docstring is the sentence."""
    LAWS[broken.__name__] = Law(broken.__name__, " ".join((broken.__doc__ or "").split()), broken)
    return broken


# ---------------------------------------------------------------------------------------------------------- the laws


@law
def poison() -> str:
    """Junk outside the mask, in padding and in padding rows changes no advantage, loss, weight or metric."""
    return _first(*_poisoned_update(), *_poisoned_advantage(), *_poisoned_metrics())


@law
def micro_batches() -> str:
    """The same rows cut into other micro-batches, ranks or with padding rows give the same update and denominators."""
    rows = make_rows()
    whole = update(rows)
    cuts = {
        "row by row": update(rows, micro_batches=MicroBatchLimit(1)),
        "three rows a micro-batch over two ranks": update(rows, ranks=2, micro_batches=MicroBatchLimit(3)),
        "packed by tokens": update(rows, micro_batches=MicroBatchLimit(tokens=30)),
        "with padding rows": update(make_rows(padding=4), ranks=2, micro_batches=MicroBatchLimit(2)),
    }
    for how, other in cuts.items():
        if other.denominators != whole.denominators:
            return f"{how}: the loss is divided by {other.denominators}, not by {whole.denominators}"
        if not torch.allclose(other.weights, whole.weights, atol=1e-6):
            return f"{how}: {_apart(other.weights, whole.weights)}"
        if why := _metrics_apart(other.metrics, whole.metrics, relative=1e-4):
            return f"{how}: {why}"
    return ""


@law
def repetition() -> str:
    """A stage that takes no gradient gives the same values when it is repeated, bit for bit."""
    worker, rows = make_worker(), make_rows()
    first, second = _scored(worker, rows), _scored(worker, rows)
    again = [_advantages(_rewards()) for _ in range(2)]
    return _first(*(_unequal(name, first[name], second[name]) for name in first), _unequal("advantages", *again))


@law
def temperature() -> str:
    """The temperature divides the log-probs of the stage that is given it, and changes nothing else."""
    # There is no critic here, whose values it must not touch: what stays is what a value head would read. The logits
    # (scoring at 1 is the same before and after), the weights, what is trained and what the loss is divided by.
    worker, rows = make_worker(), make_rows()
    before, weights = _scored(worker, rows), _weights(worker)
    cold = _scored(worker, rows, temperature=0.5)
    after = _scored(worker, rows)
    if all(torch.equal(one, two) for one, two in zip(before["log_probs"], cold["log_probs"], strict=True)):
        return "at temperature 0.5 the log-probs are those at 1"
    warm, cool = update(rows), update(rows, temperature=0.5)
    if warm.denominators != cool.denominators or warm.tokens != cool.tokens:
        return f"the loss is over {cool.tokens} tokens / {cool.denominators}, not {warm.tokens} / {warm.denominators}"
    return _first(
        *(_unequal(f"{name} at 1 after scoring at 0.5", before[name], after[name]) for name in before),
        _unequal("weights", [weights], [_weights(worker)]),
    )


@law
def resume() -> str:
    """A run that stopped and went on from its checkpoint ends in the weights of the run that never stopped."""
    with tempfile.TemporaryDirectory() as name:
        straight, resumed = Path(name, "straight"), Path(name, "resumed")
        ends = run(straight, *_STATEFUL, "trainer.save_freq=1")
        saved = straight / "checkpoints" / "global_step_1"
        onwards = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={saved}")
        other = run(resumed, *_STATEFUL, *onwards)
    return "" if torch.equal(ends, other) else f"resumed after step 1: {_apart(other, ends)}"


@law
def tracing() -> str:
    """A traced run ends in the weights of an untraced one, bit for bit."""
    with tempfile.TemporaryDirectory() as name:
        plain = run(Path(name, "plain"))
        traced = run(Path(name, "traced"), traced=True)
    return "" if torch.equal(plain, traced) else f"traced: {_apart(traced, plain)}"


# -------------------------------------------------------------------------------------------- what they are made of

_STATEFUL = (
    "actor_rollout_ref.actor.shuffle=true",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.horizon=20",
)
_JUNK = 321.0
_VALUES = ("old_log_probs", "ref_log_prob", "advantages")


@dataclass(frozen=True)
class Update:
    """What one update left.

    Attributes:
        weights: all parameters as one vector.
        denominators: by term of the loss, of each optimiser step.
        tokens: by term, tokens under its mask in all.
    """

    weights: Tensor
    metrics: dict[str, float]
    denominators: dict[str, list[float]]
    tokens: dict[str, int]


class _Watched(TrainingWorker):
    """A worker that says what it divided by; plain gradient descent, as AdamW's first step is the gradient's sign."""

    def watch(self) -> _Watched:
        self.denominators, self.tokens = dict[str, list[float]](), dict[str, int]()
        plain = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.optimizer: Any = plain
        self.scheduler: Any = torch.optim.lr_scheduler.ConstantLR(plain, factor=1.0)
        return self

    def _optimizer_step(self, done: Any, *rest: Any) -> dict[str, float]:
        for name in done[0].loss.terms:
            terms = [micro.loss.terms[name] for micro in done]
            self.denominators.setdefault(name, []).extend(sorted({term.share.denominator for term in terms}))
            self.tokens[name] = self.tokens.get(name, 0) + sum(int(term.tokens) for term in terms)
        return super()._optimizer_step(done, *rest)


@dataclass(frozen=True)
class _Junk(SequenceRows):
    """Rows whose padding cells hold junk where a mask says that nothing is there."""

    def select(self, rows: Sequence[int]) -> SequenceRows:
        return _Junk(**vars(super().select(rows)))

    def padded(self, name: str, value: float = 0) -> Tensor:
        return super().padded(name, _JUNK if name in _VALUES else 7 if name == "input_ids" else value)


def make_rows(count: int = 8, padding: int = 0, junk: bool = False) -> SequenceRows:
    """Random trajectories of uneven lengths, some of whose response tokens do not train, and padding rows.

    Args:
        count: real rows.
        padding: rows none of whose tokens trains.
        junk: put other values wherever no token trains, and in padding cells.
    """
    generator = torch.Generator().manual_seed(3)
    columns: dict[str, list[Tensor]] = {}
    for row in range(count + padding):
        prompt, response = 3 + row % 3, 3 + row % 5
        mask = torch.ones(response, dtype=torch.long)
        mask[1 + row % 2] = 0  # an observation
        if row >= count:
            mask[:] = 0
        made = {
            "input_ids": torch.randint(5, 90, (prompt + response,), generator=generator),
            "attention_mask": torch.ones(prompt + response, dtype=torch.long),
            "position_ids": torch.arange(prompt + response),
            "loss_mask": mask,
        }
        for name in _VALUES:
            value = torch.randn(response, generator=generator) * 0.1 - 4.6
            made[name] = value * mask if name == "advantages" else value
            if junk:
                made[name] = torch.where(mask.bool(), made[name], torch.full_like(value, _JUNK))
        for name, tensor in made.items():
            columns.setdefault(name, []).append(tensor)
    tokens = [int(mask.sum()) for mask in columns["loss_mask"]]
    kind = _Junk if junk else SequenceRows
    return kind([f"u_{row}_0" for row in range(count + padding)], columns, tokens)


def make_worker(ranks: int = 1) -> _Watched:
    """The tiny model under training, fresh."""
    disable_progress_bar()
    model = load_model(find_model("tiny"))
    use_few_threads(model)
    config = OmegaConf.structured(ActorConfig())
    topology = embedded_topology(1, ranks)
    return _Watched(model, config, topology, total_training_steps=10, pad_token_id=0).watch()


def update(
    rows: SequenceRows, ranks: int = 1, micro_batches: MicroBatchLimit | None = None, temperature: float = 1.0
) -> Update:
    """Train a fresh model on these rows: one mini-batch."""
    worker = make_worker(ranks)
    plan = UpdatePlan(
        mini_batch_size=len(rows),
        micro_batches=micro_batches or MicroBatchLimit(),
        epochs=1,
        temperature=temperature,
        shuffle_seed=None,
        version=0,
    )
    metrics = worker.train_mini_batch(rows, plan)
    return Update(_weights(worker), metrics, worker.denominators, worker.tokens)


def run(folder: Path, *overrides: str, traced: bool = False) -> Tensor:
    """Train the lab's run in a folder; returns the actor's weights as one vector."""
    disable_progress_bar()
    config = compose([*lab.OVERRIDES, f"trainer.default_local_dir={folder / 'checkpoints'}", *overrides])
    adapt_to_mode(config)
    validate_config(config)
    trainer = PPOTrainerSync(config, folder=folder)

    async def train() -> None:
        await trainer.init()
        await trainer.fit()

    with hooks.recording(folder, config={}, run={}) if traced else nullcontext():
        asyncio.run(train())
    worker: Any = trainer.parts.worker  # here one engine, which has the tensors
    return torch.cat([tensor.detach().reshape(-1).float() for _, tensor in worker.state_dict()])


def _poisoned_update() -> Iterator[str]:
    clean, junk = (update(make_rows(padding=2, junk=junk), micro_batches=MicroBatchLimit(5)) for junk in (False, True))
    if clean.denominators != junk.denominators:
        yield f"junk changes what the loss is divided by: {junk.denominators}, not {clean.denominators}"
    yield _metrics_apart(junk.metrics, clean.metrics, relative=0.0)
    yield _unequal("weights after the update", [clean.weights], [junk.weights])


def _poisoned_advantage() -> Iterator[str]:
    """Rewards of padding rows; log-probs outside the mask, for the KL in the reward and the rollout correction."""
    rewards = _rewards()
    poisoned = rewards.clone()
    poisoned[-1] = _JUNK
    yield _unequal("advantages", _advantages(rewards), _advantages(poisoned))
    mask = _mask()
    ones = [torch.linspace(-3, -1, mask.numel()).reshape(mask.shape) + shift for shift in (0.0, 0.1)]
    twos = [
        torch.where(mask.bool(), one, torch.full_like(one, junk)) for one, junk in zip(ones, (_JUNK, -9.0), strict=True)
    ]
    kl = [
        apply_kl_penalty(rewards, old, ref, mask, controller=KLController(0.5), kind="low_var_kl")
        for old, ref in (ones, twos)
    ]
    yield _unequal("rewards less the KL", *([one.token_level_rewards] for one in kl))
    yield _metrics_apart(kl[1].metrics, kl[0].metrics, relative=0.0)
    config = OmegaConf.create({"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": False})
    config = OmegaConf.merge(OmegaConf.structured(RolloutCorrectionConfig()), config)
    corrected = [compute_rollout_correction(old, rollout, mask, config) for old, rollout in (ones, twos)]
    yield _unequal("the corrected mask", *([one.response_mask] for one in corrected))
    yield _metrics_apart(corrected[1].metrics, corrected[0].metrics, relative=0.0)


def _poisoned_metrics() -> Iterator[str]:
    mask = _mask()
    clean = torch.linspace(-1, 1, mask.numel()).reshape(mask.shape) * mask
    junk = torch.where(mask.bool(), clean, torch.full_like(clean, _JUNK))
    said = [
        compute_data_metrics(
            DataRows(
                rm_scores=list(_rewards()),
                token_level_rewards=list(_rewards()),
                advantages=list(values),
                returns=list(values),
                response_mask=list(mask),
                prompt_lens=torch.full((len(mask),), 4),
                num_turns=torch.full((len(mask),), 2),
                clipped_at=9,
                prompts_clipped_at=9,
            )
        )
        | compute_rollout_metrics(values.flatten(), clean.flatten() * 0.9, mask.flatten())
        for values in (clean, junk)
    ]
    yield _metrics_apart(said[1], said[0], relative=0.0)


def _mask() -> Tensor:
    """Two groups of two sessions and a padding row, ``(5, 6)``."""
    mask = torch.ones(5, 6, dtype=torch.long)
    mask[0, 2:4] = mask[1, 5] = mask[4] = 0
    return mask


def _rewards() -> Tensor:
    rewards = torch.zeros(5, 6)
    rewards[:4, -1] = torch.tensor([1.0, 0.0, 0.5, 1.0])
    return rewards


def _advantages(rewards: Tensor) -> list[Tensor]:
    uids = ["a", "a", "b", "b", "pad"]
    keys = [f"{uid}_{row % 2}_0" for row, uid in enumerate(uids)]
    made = compute_advantage(rewards, _mask(), keys, uids=uids, is_padding=[uid == "pad" for uid in uids])
    return [made.advantages, made.returns]


def _scored(worker: TrainingWorker, rows: SequenceRows, temperature: float = 1.0) -> dict[str, list[Tensor]]:
    scores = worker.infer_batch(rows, micro_batches=MicroBatchLimit(3), temperature=temperature, with_entropy=True)
    return {"log_probs": scores.log_probs, "entropy": scores.entropy}


def _weights(worker: TrainingWorker) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in worker.module.parameters()])


def _first(*said: str) -> str:
    return next((one for one in said if one), "")


def _unequal(name: str, one: Sequence[Tensor], two: Sequence[Tensor]) -> str:
    apart = [(a, b) for a, b in zip(one, two, strict=True) if not torch.equal(a, b)]
    return f"{name}: {_apart(apart[0][1], apart[0][0])}" if apart else ""


def _apart(one: Tensor, two: Tensor) -> str:
    if one.shape != two.shape:
        return f"{list(one.shape)} values, not {list(two.shape)}"
    count = int((one != two).sum())
    return f"{count:,} of {one.numel():,} values differ, by at most {float((one - two).abs().max()):.3g}"


def _metrics_apart(one: Mapping[str, float], two: Mapping[str, float], relative: float) -> str:
    for name in sorted({*one, *two}):
        if name not in one or name not in two:
            return f"metric {name} is there once only"
        if not math.isclose(one[name], two[name], rel_tol=relative, abs_tol=relative * 1e-2):
            return f"metric {name} is {one[name]:.9g}, not {two[name]:.9g}"
    return ""
