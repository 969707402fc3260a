"""Faults of advantages and returns: on which tokens they lie, and in which rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lineage.hooks import parse_key
from lineage.trainer.advantage import Advantages
from lineage.trainer.faults.registry import Seams, fault, trace_fault
from lineage.trainer.faults.rows import TraceRows
from lineage.trainer.faults.seams import ESTIMATOR
from lineage.trainer.protocol import nested_from_list
from lineage.trainer.training import rows_of

REJECTING = (
    "algorithm.rollout_correction.rollout_rs=token_k1",
    "algorithm.rollout_correction.rollout_rs_threshold=0.9999999_1.0000001",
)
DRAFTS = ("+experiment=multi_output", "actor_rollout_ref.rollout.n=4")


def _afterwards(change: Callable[[Advantages, Tensor, Sequence[str]], Advantages]) -> Seams:
    """The estimator, and then a change of what it gave: by mask ``(batch, response_len)`` and keys."""

    def estimate(original: Any, rewards: Tensor, mask: Tensor, keys: Sequence[str], **options: Any) -> Advantages:
        return change(original(rewards, mask, keys, **options), mask, keys)

    return {ESTIMATOR: estimate}


# ----------------------------------------------------------------------------------------------- outside the mask


@fault("ADV001", "advantage", reports=["areal-seq-advantage-includes-masked"])
def advantages_not_masked() -> Seams:
    """The score of a session is broadcast over the whole padded response, without the mask."""

    def estimate(original: Any, scores: Tensor, mask: Tensor, *rest: Any, **options: Any) -> Any:
        return original(scores, torch.ones_like(mask), *rest, **options)

    return {ESTIMATOR: estimate}


@fault("ADV001", "advantage", *REJECTING)
def rejected_tokens_keep_an_advantage() -> Seams:
    """The advantage is laid over the mask as it was before the rollout correction took tokens out of it."""
    masks: list[Tensor] = []

    def correct(original: Any, config: Any, data: Any, *rest: Any) -> Tensor:
        masks[:] = [data.batch["response_mask"].clone()]
        return original(config, data, *rest)

    def estimate(original: Any, rewards: Tensor, mask: Tensor, *rest: Any, **options: Any) -> Advantages:
        return original(rewards, masks[0], *rest, **options)

    return {"lineage.trainer.stages.advantage._correct": correct, ESTIMATOR: estimate}


@fault("ADV001", "advantage")
def returns_not_masked() -> Seams:
    """The advantages are masked and the returns beside them are not."""

    def change(made: Advantages, mask: Tensor, _keys: Sequence[str]) -> Advantages:
        high, low = made.returns.amax(-1, keepdim=True), made.returns.amin(-1, keepdim=True)
        return Advantages(made.advantages, torch.where(high > -low, high, low).expand_as(mask).contiguous())

    return _afterwards(change)


@fault("MSK002", "advantage", *REJECTING, also=["REW007"], reports=["verl-outcome-reward-on-rejected-token"])
def a_rejection_nobody_is_told_of() -> Seams:
    """The correction rejects the token that holds the score and marks no row: the score still moves the baseline."""

    def nothing(_original: Any, before: Tensor, _after: Tensor) -> list[str | None]:
        return [None] * len(before)

    return {"lineage.trainer.stages.advantage.rejected_rows": nothing}


# ------------------------------------------------------------------------------ in other rows, or of another size


@fault("LEN003", "advantage")
def advantages_written_to_the_next_row() -> Seams:
    """Advantages are right, and are written back with an offset of one row."""

    def put(original: Any, parts: Any, batch: Any, columns: dict[str, Tensor]) -> None:
        masks = [values != 0 for values in rows_of(columns["advantages"])]
        scalars = [values.abs().max() * values.sum().sign() for values in rows_of(columns["advantages"])]
        rolled = [scalar * mask for scalar, mask in zip([scalars[-1], *scalars[:-1]], masks, strict=True)]
        original(parts, batch, {**columns, "advantages": nested_from_list(rolled)})

    return {"lineage.trainer.stages.advantage.put": put}


@fault("ADV002", "advantage")
def negative_advantages_are_cut() -> Seams:
    """Only answers better than their group train: negative advantages are clamped to 0."""

    def change(made: Advantages, _mask: Tensor, _keys: Sequence[str]) -> Advantages:
        kept = made.advantages.clamp(min=0)
        return Advantages(kept, kept.clone())

    return _afterwards(change)


@trace_fault("ADV003", "advantage")
def a_loop_that_traces_no_rewards(rows: TraceRows) -> None:
    """A loop that records no rewards takes them against the mean of something else: its groups do not balance."""
    # Our trainer always traces the rewards it was given, and then ADV002 says it.
    rewards = ("rm_scores", "token_level_scores", "token_level_rewards")
    rows.rows = [row for row in rows.rows if row["field"] not in rewards]
    for row in rows.rows:
        if row["global_steps"] == 2 and row["field"] in ("advantages", "returns") and row["min_in"]:
            _raise_by(row, 0.25)


def _raise_by(row: dict[str, Any], by: float) -> None:
    if row["sum_in"] is None:
        return
    sums = zip(row["sum_in"], row["mask_sum"] or row["valid_length"], strict=True)
    row["sum"] = row["sum_in"] = [total + by * tokens for total, tokens in sums]
    for name in ("min_in", "max_in"):
        row[name] = [None if value is None else value + by for value in row[name]]
    row["fingerprint"] = [(value + 1) % 2**64 for value in row["fingerprint"]]


# ------------------------------------------------------------------------------------------ not one value a session


@fault("ADV004", "advantage", reports=["slime-whiten-without-cp-group"])
def halves_whitened_apart() -> Seams:
    """Two context-parallel ranks hold a half of each sequence and divide it by a deviation of their own."""

    def change(made: Advantages, mask: Tensor, _keys: Sequence[str]) -> Advantages:
        white, half = made.advantages.clone(), mask.shape[1] // 2
        for part in (slice(None, half), slice(half, None)):
            white[:, part] /= made.advantages[:, part][mask[:, part].bool()].std() + 1e-8
        return Advantages(white, white.clone())

    return _afterwards(change)


@fault("ADV004", "advantage")
def the_advantage_fades() -> Seams:
    """A discount of an estimator with a critic is applied to an outcome: early tokens get less of it."""

    def change(made: Advantages, mask: Tensor, _keys: Sequence[str]) -> Advantages:
        left = mask.flip(-1).cumsum(-1).flip(-1) - mask
        faded = made.advantages * 0.99**left
        return Advantages(faded, faded.clone())

    return _afterwards(change)


@fault("ADV004", "advantage")
def only_the_last_token_trains() -> Seams:
    """The advantage stands where the score stood, on the last token, and nowhere else."""

    def change(made: Advantages, mask: Tensor, _keys: Sequence[str]) -> Advantages:
        last = (mask.cumsum(-1) == mask.sum(-1, keepdim=True)) & mask.bool()
        return Advantages(made.advantages * last, made.returns * last)

    return _afterwards(change)


@fault("ADV004", "advantage", reports=["verl-return-scan-reset-at-observation"])
def the_return_scan_stops() -> Seams:
    """The backward scan of the return is reset on the way: tokens before that point have return 0."""

    def change(made: Advantages, mask: Tensor, _keys: Sequence[str]) -> Advantages:
        returns = made.returns.clone()
        returns[:, : mask.shape[1] // 2] = 0
        return Advantages(made.advantages, returns)

    return _afterwards(change)


@fault("ADV004", "advantage", *DRAFTS, reports=["skyrl-stepwise-advantage-wrong-mask"])
def the_last_outputs_mask_on_all_outputs() -> Seams:
    """The masked advantage of a session's last output is copied to the others, whose tokens lie elsewhere."""

    def change(made: Advantages, mask: Tensor, keys: Sequence[str]) -> Advantages:
        parsed = [parse_key(key) for key in keys]
        place = {(one.uid, one.session_id, one.index): row for row, one in enumerate(parsed) if one is not None}
        advantages = made.advantages.clone()
        for row, one in enumerate(parsed):
            final = None if one is None or one.index else place.get((one.uid, one.session_id, 1))
            if final is not None:
                advantages[row] = made.advantages[final].roll(2) * mask[row]
                advantages[row, :2] = 0
        return Advantages(advantages, advantages.clone())

    return _afterwards(change)


@fault("ADV004", "advantage", "+experiment=multi_output")
def earlier_outputs_do_not_train() -> Seams:
    """The advantage of a session reaches its last output alone: the outputs before it train on 0."""

    def change(made: Advantages, _mask: Tensor, keys: Sequence[str]) -> Advantages:
        parsed = [parse_key(key) for key in keys]
        last = torch.tensor([one is not None and one.index > 0 for one in parsed]).unsqueeze(-1)
        return Advantages(made.advantages * last, made.returns * last)

    return _afterwards(change)


# ---------------------------------------------------------------------------------------------------- groups of one


def _alone(value: Callable[[Tensor], Tensor]) -> Seams:
    """Groups of one treated by ``value``, the others as ever."""

    def relative(original: Any, scores: Tensor, groups: Sequence[str], *rest: Any) -> Tensor:
        lone = torch.tensor([list(groups).count(group) == 1 for group in groups])
        return torch.where(lone, value(scores), original(scores, groups, *rest))

    return {"lineage.trainer.advantage.group_relative": relative}


@fault("ADV005", "advantage", "actor_rollout_ref.rollout.n=1")
def a_lone_session_trains_on_its_reward() -> Seams:
    """A group of one has mean 0 and deviation 1: its raw reward is its advantage."""
    return _alone(lambda scores: scores / (1 + 1e-6))


@fault("ADV005", "advantage", "+experiment=failures", step=1)
def the_survivor_of_a_group_meets_the_batch() -> Seams:
    """The other sessions of a group failed, and the one that is left is compared with the mean of the batch."""
    return _alone(lambda scores: scores - scores.mean())


@fault("VAL001", "advantage", "actor_rollout_ref.rollout.n=1", reports=["roll-whiten-single-token"])
def the_deviation_of_one() -> Seams:
    """The unbiased deviation of one score is not a number, and neither is the advantage."""
    return _alone(lambda scores: torch.full_like(scores, float("nan")))
