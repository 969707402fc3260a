"""Faults of the group: which scores an advantage is taken against, and on what scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lineage.hooks import parse_key
from lineage.trainer.advantage import Advantages
from lineage.trainer.faults.registry import Seams, fault
from lineage.trainer.faults.seams import ESTIMATOR

GROUP_RELATIVE = "lineage.trainer.advantage.group_relative"

Relative = Callable[[Tensor, list[str], bool, float], Tensor]


def _relative(made: Relative) -> Seams:
    """Another ``group_relative``: from session scores ``(sessions,)``, their groups, the scale flag and epsilon."""

    def relative(_original: Any, scores: Tensor, groups: Sequence[str], norm: bool = True, eps: float = 1e-6) -> Tensor:
        return made(scores, list(groups), norm, eps)

    return {GROUP_RELATIVE: relative}


def _by_group(scores: Tensor, groups: Sequence[str], one: Callable[[Tensor], Tensor]) -> Tensor:
    """``one`` of each group's scores, put back where they came from."""
    result = torch.zeros_like(scores)
    for group in dict.fromkeys(groups):
        rows = torch.tensor([i for i, name in enumerate(groups) if name == group])
        result[rows] = one(scores[rows])
    return result


def _scaled(centred: Tensor, std: Tensor, eps: float) -> Tensor:
    return centred / (std + eps)


# ------------------------------------------------------------------------------------------------ which sessions


@fault("ADV002", "advantage", reports=["prime-repeat-vs-repeat-interleave"])
def groups_read_as_windows() -> Seams:
    """Prompts lie tiled in the batch (a, b, a, b), and every n rows in a row are taken for a group."""

    def relative(original: Any, scores: Tensor, groups: Sequence[str], *rest: Any) -> Tensor:
        n = len(groups) // len(set(groups))
        return original(scores, [str(row // n) for row in range(len(groups))], *rest)

    return {GROUP_RELATIVE: relative}


@fault("ADV002", "advantage", reports=["rllm-trajectory-uuid-as-group"])
def a_uuid_for_every_row() -> Seams:
    """Every rollout was given a uid of its own as its group: advantages are the raw rewards."""
    return _relative(lambda scores, groups, norm, eps: scores / (1.0 + eps))


@fault("ADV002", "advantage")
def every_row_its_own_group() -> Seams:
    """Grouping by the trajectory key instead of the uid: no session has a peer, and every advantage is 0."""

    def relative(original: Any, scores: Tensor, groups: Sequence[str], *rest: Any) -> Tensor:
        return original(scores, [f"{group}_{row}" for row, group in enumerate(groups)], *rest)

    return {GROUP_RELATIVE: relative}


@fault("ADV002", "advantage", "+experiment=failures", step=1, reports=["slime-uneven-groups-global-baseline"])
def uneven_groups_fall_back_to_the_batch() -> Seams:
    """A group lost a session, the scores cannot be folded into n columns, and all of them become one group."""

    def relative(original: Any, scores: Tensor, groups: Sequence[str], *rest: Any) -> Tensor:
        sizes = {list(groups).count(group) for group in groups}
        return original(scores, list(groups) if len(sizes) == 1 else ["all"] * len(groups), *rest)

    return {GROUP_RELATIVE: relative}


@fault("ADV002", "advantage", "actor_rollout_ref.rollout.n=4")
def each_rank_knows_its_own_rows() -> Seams:
    """Each data-parallel rank normalises the rows it was dealt: a group that lies on two ranks has two baselines."""

    def relative(original: Any, scores: Tensor, groups: Sequence[str], *rest: Any) -> Tensor:
        half = len(groups) // 2
        return original(scores, [f"{group}/{row >= half}" for row, group in enumerate(groups)], *rest)

    return {GROUP_RELATIVE: relative}


@fault("ADV002", "advantage")
def groups_of_the_batch_before_balance() -> Seams:
    """The group names are those of the order before the balance, the scores those of the order after it."""

    def relative(original: Any, scores: Tensor, groups: Sequence[str], *rest: Any) -> Tensor:
        return original(scores, sorted(groups), *rest)

    return {GROUP_RELATIVE: relative}


@fault("ADV002", "advantage", "actor_rollout_ref.rollout.n=3")
def the_first_session_is_left_out() -> Seams:
    """An index that starts at 1: the first session of a group is in no mean and no deviation."""

    def one(scores: Tensor) -> Tensor:
        rest = scores[1:]
        return _scaled(scores - rest.mean(), rest.std(), 1e-6)

    return _relative(lambda scores, groups, norm, eps: _by_group(scores, groups, one))


@fault("ADV002", "advantage", "+experiment=multi_output", reports=["slime-fanout-sample-weighted-baseline"])
def rows_stand_for_sessions() -> Seams:
    """A session that returned two outputs counts twice in the mean and the deviation of its group."""

    def one(scores: Tensor) -> Tensor:
        rows = scores.repeat_interleave(2)
        return _scaled(scores - rows.mean(), rows.std(), 1e-6)

    return _relative(lambda scores, groups, norm, eps: _by_group(scores, groups, one))


@fault("ADV002", "advantage", "+experiment=[multi_output,kl_in_reward]")
def session_scored_by_its_first_output() -> Seams:
    """The score of a session is taken from its first output, whose token rewards are less another KL."""

    def finals(original: Any, keys: Sequence[str], is_padding: Sequence[bool]) -> dict[tuple[str, int], int]:
        found = original(keys, is_padding)
        for row, key in enumerate(keys):
            parsed = parse_key(key)
            if parsed is not None and parsed.index == 0 and (parsed.uid, parsed.session_id) in found:
                found[parsed.uid, parsed.session_id] = row
        return found

    return {"lineage.trainer.advantage.final_outputs": finals}


@fault("ADV002", "advantage", reports=["rllm-step-id-collision-and-retry-contamination"])
def scattered_by_uid_alone() -> Seams:
    """Advantages go back to their rows through a dictionary keyed by the uid: each session gets the last one's."""

    def estimate(original: Any, rewards: Tensor, mask: Tensor, keys: Sequence[str], **options: Any) -> Advantages:
        values = original(rewards, torch.ones_like(mask), keys, **options).advantages[:, :1]
        last = dict(zip(options["uids"], values, strict=True))
        rows = torch.stack([last[uid] for uid in options["uids"]])
        return Advantages(rows * mask, rows * mask)

    return {ESTIMATOR: estimate}


# ---------------------------------------------------------------------------------------------------- which mean


@fault("ADV002", "advantage", onwards=True)
def a_moving_baseline() -> Seams:
    """The baseline is a running mean over the steps instead of the group's mean."""
    mean = [0.0]

    def made(scores: Tensor, groups: list[str], norm: bool, eps: float) -> Tensor:
        mean[0] = 0.9 * mean[0] + 0.1 * float(scores.mean())
        return _by_group(scores, groups, lambda own: _scaled(own - mean[0], own.std(), eps))

    return _relative(made)


@fault("ADV002", "advantage")
def the_baseline_leaves_itself_out() -> Seams:
    """Each session is compared with the mean of the others, on the scale of the whole group."""

    def one(scores: Tensor) -> Tensor:
        others = (scores.sum() - scores) / max(len(scores) - 1, 1)
        return _scaled(scores - others, scores.std(), 1e-6)

    return _relative(lambda scores, groups, norm, eps: _by_group(scores, groups, one))


@fault("ADV002", "advantage")
def leave_one_out_off_by_one() -> Seams:
    """The mean of the other sessions is their sum over n instead of n - 1."""

    def one(scores: Tensor) -> Tensor:
        return _scaled(scores - (scores.sum() - scores) / len(scores), scores.std(), 1e-6)

    return _relative(lambda scores, groups, norm, eps: _by_group(scores, groups, one))


@fault("ADV002", "advantage")
def baseline_weighted_by_length() -> Seams:
    """The mean is taken over tokens: a long answer weighs more in its group's baseline than a short one."""

    def estimate(original: Any, rewards: Tensor, mask: Tensor, keys: Sequence[str], **options: Any) -> Advantages:
        scores, tokens = rewards.double().sum(-1), mask.double().sum(-1)

        def one(rows: Tensor) -> Tensor:
            at = rows.long()
            mean = (scores[at] * tokens[at]).sum() / tokens[at].sum().clamp(min=1)
            return _scaled(scores[at] - mean, scores[at].std() if len(at) > 1 else torch.ones(()), 1e-6)

        values = _by_group(torch.arange(len(keys)).double(), options["uids"], one).float().unsqueeze(-1)
        return Advantages(values * mask, values * mask)

    return {ESTIMATOR: estimate}


@fault("ADV002", "advantage", "+experiment=kl_in_reward")
def baseline_without_the_penalty() -> Seams:
    """The baseline is the mean of the scores, while each session's own reward is less the KL."""
    scores: list[Tensor] = []

    def correct(original: Any, config: Any, data: Any, keys: list[str], *rest: Any) -> Tensor:
        scores[:] = [data.batch["rm_scores"].double().sum(-1)]
        return original(config, data, keys, *rest)

    def estimate(original: Any, rewards: Tensor, mask: Tensor, keys: Sequence[str], **options: Any) -> Advantages:
        own = rewards.double().sum(-1)
        raw = _by_group(scores[0], options["uids"], lambda group: group.mean().expand(len(group)))
        std = _by_group(own, options["uids"], lambda group: group.std().expand(len(group)))
        values = (_scaled(own - raw, std, 1e-6) * mask.any(-1)).float().unsqueeze(-1)
        return Advantages(values * mask, values * mask)

    return {"lineage.trainer.stages.advantage._correct": correct, ESTIMATOR: estimate}


# --------------------------------------------------------------------------------------------------- which scale


@fault("ADV002", "advantage")
def scale_of_the_batch() -> Seams:
    """Scores are centred in their group and divided by the deviation of the whole batch."""

    def made(scores: Tensor, groups: list[str], norm: bool, eps: float) -> Tensor:
        return _scaled(_by_group(scores, groups, lambda own: own - own.mean()), scores.std(), eps)

    return _relative(made)


@fault("ADV002", "advantage")
def biased_deviation() -> Seams:
    """The deviation divides by n instead of n - 1: advantages of small groups are too large."""

    def one(scores: Tensor) -> Tensor:
        return _scaled(scores - scores.mean(), scores.std(correction=0), 1e-6)

    return _relative(lambda scores, groups, norm, eps: _by_group(scores, groups, one))


@fault("ADV002", "advantage")
def epsilon_under_the_root() -> Seams:
    """Epsilon is added to the variance instead of the deviation."""

    def one(scores: Tensor) -> Tensor:
        return (scores - scores.mean()) / (scores.var() + 1e-6).sqrt()

    return _relative(lambda scores, groups, norm, eps: _by_group(scores, groups, one))


@fault("ADV002", "advantage", "algorithm.norm_adv_by_std_in_grpo=false")
def any_text_is_true() -> Seams:
    """norm_adv_by_std_in_grpo=false arrives as text, which is true: advantages are scaled all the same."""

    def estimate(original: Any, *args: Any, **options: Any) -> Advantages:
        return original(*args, **{**options, "norm_by_std": bool("false")})

    return {ESTIMATOR: estimate}


@fault("ADV002", "advantage")
def the_scale_is_forgotten() -> Seams:
    """norm_adv_by_std_in_grpo is not handed on: advantages are differences of scores."""

    def estimate(original: Any, *args: Any, **options: Any) -> Advantages:
        return original(*args, **{**options, "norm_by_std": False})

    return {ESTIMATOR: estimate}


@fault("ADV002", "advantage", "actor_rollout_ref.rollout.n=3")
def whitened_once_more() -> Seams:
    """Group-relative advantages are whitened over all policy tokens of the batch, as for another estimator."""

    def estimate(original: Any, rewards: Tensor, mask: Tensor, keys: Sequence[str], **options: Any) -> Advantages:
        values = original(rewards, mask, keys, **options).advantages
        inside = values[mask.bool()]
        white = (values - inside.mean()) / (inside.std() + 1e-8) * mask
        return Advantages(white, white.clone())

    return {ESTIMATOR: estimate}


@fault("ADV002", "advantage", "actor_rollout_ref.rollout.n=3")
def scores_in_bfloat16() -> Seams:
    """Scores are cast to the model's bfloat16 before they are compared: near ones become equal."""

    def relative(original: Any, scores: Tensor, *rest: Any) -> Tensor:
        return original(scores.bfloat16().double(), *rest)

    return {GROUP_RELATIVE: relative}


# -------------------------------------------------------------------------------------------------- padding, trace


def _padding_with(names: Callable[[list[str], list[bool]], list[str]]) -> Seams:
    def estimate(original: Any, rewards: Tensor, mask: Tensor, keys: Sequence[str], **options: Any) -> Advantages:
        pads = list(options["is_padding"])
        uids = names(list(options["uids"]), pads)
        return original(rewards, mask, keys, **{**options, "uids": uids, "is_padding": [False] * len(pads)})

    return {ESTIMATOR: estimate}


@fault("ADV006", "advantage")
def padding_with_the_uid_it_was_copied_from() -> Seams:
    """Padding rows join the group of the first row of the batch: their zeros pull its baseline down."""
    return _padding_with(
        lambda uids, pads: [uids[pads.index(False)] if pad else uid for uid, pad in zip(uids, pads, strict=True)]
    )


@fault("ADV006", "advantage", "actor_rollout_ref.rollout.n=3")
def padding_is_spread_over_the_groups() -> Seams:
    """The batch is filled up group by group: every padding row is a session of another real group."""

    def names(uids: list[str], pads: list[bool]) -> list[str]:
        real = list(dict.fromkeys(uid for uid, pad in zip(uids, pads, strict=True) if not pad))
        turn = iter(real * len(uids))
        return [next(turn) if pad else uid for uid, pad in zip(uids, pads, strict=True)]

    return _padding_with(names)
