"""Faults of rewards: what the scorer reads and says, where the score lies, whose it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from lineage.trainer.faults.registry import Seams, fault
from lineage.trainer.faults.seams import TRAJECTORY_FIELDS
from lineage.trainer.protocol import KVBatchMeta, nested_from_list
from lineage.trainer.reward.manager import Score
from lineage.trainer.training import rows_of

RUN_SINGLE = "lineage.trainer.reward.manager.NaiveRewardManager.run_single"
COMPUTE_SCORE = "lineage.trainer.reward.loop.RewardLoopWorker.compute_score"
SESSION_SCORE = "lineage.trainer.agent_loop.worker.AgentLoopWorker._compute_score"
CORRECT = "lineage.trainer.stages.advantage._correct"
COLOCATED = "+experiment=reward_colocated"


def _scores_written(change: Callable[[list[Tensor]], list[Tensor]]) -> Seams:
    """``rm_scores`` of a group changed before they are written, a row ``(response_len,)`` an output."""

    def write(original: Any, *args: Any) -> TensorDict:
        fields = original(*args)
        fields["rm_scores"] = nested_from_list(change(rows_of(fields["rm_scores"])))
        return fields

    return {TRAJECTORY_FIELDS: write}


def _last(row: Tensor, value: Tensor) -> Tensor:
    changed = torch.zeros_like(row)
    changed[-1] = value
    return changed


# ------------------------------------------------------------------------------------------- REW001: what is said


@fault("REW001", "reward", reports=["verl-overlong-len-zero-nan"])
def overlong_penalty_over_nothing() -> Seams:
    """The penalty of long answers divides by a buffer of length 0: 0/0 where the length is just reached."""

    async def score(original: Any, manager: Any, response: Sequence[int], row: Mapping[str, Any]) -> Score:
        said = await original(manager, response, row)
        return dataclasses.replace(said, score=float("nan")) if len(response) == 8 else said

    return {RUN_SINGLE: score}


@fault("REW001", "reward")
def the_logarithm_of_a_zero() -> Seams:
    """Scores are taken as logarithms, and that of a wrong answer is minus infinity."""

    async def score(original: Any, manager: Any, response: Sequence[int], row: Mapping[str, Any]) -> Score:
        said = await original(manager, response, row)
        return said if said.score else dataclasses.replace(said, score=float("-inf"))

    return {RUN_SINGLE: score}


@fault("REW001", "rollout", reports=["openrlhf-zero-score-falsy"])
def a_zero_taken_for_a_missing_score() -> Seams:
    """``score or default``: an answer that earned 0 is given the default."""

    async def score(original: Any, *args: Any) -> float:
        return await original(*args) or 0.5

    return {SESSION_SCORE: score}


@fault("REW001", "rollout", reports=["roll-reward-worker-zero"])
def rewards_stay_zeros_like() -> Seams:
    """The token rewards are made as ``zeros_like`` of the response and the score is never put in."""
    return _scores_written(lambda rows: [torch.zeros_like(row) for row in rows])


@fault("REW001", "rollout")
def scores_in_half_precision() -> Seams:
    """The score passes through a half-precision tensor on its way to the queue."""
    return _scores_written(lambda rows: [row.bfloat16().float() for row in rows])


@fault("REW001", "rollout")
def one_score_for_the_group() -> Seams:
    """The scores of a group are one tensor that is broadcast: every session carries the first one's."""
    return _scores_written(lambda rows: [_last(row, rows[0][-1]) for row in rows])


@fault("REW001", "rollout")
def the_length_bonus_nobody_asked_for() -> Seams:
    """A shaping term is added to the score after the scorer: what is written is not what was said."""
    return _scores_written(lambda rows: [_last(row, row[-1] + 0.001 * len(row)) for row in rows])


# ------------------------------------------------------------------------------------------- REW001: where it lies


@fault("REW001", "rollout")
def score_on_the_first_token() -> Seams:
    """The score lies on the first token of the response."""
    return _scores_written(lambda rows: [row.flip(0) for row in rows])


@fault("REW001", "rollout")
def score_on_every_token() -> Seams:
    """The score is broadcast over the response: its sum is the score times the length."""
    return _scores_written(lambda rows: [row[-1].expand(len(row)).clone() for row in rows])


@fault("REW001", "reward", COLOCATED)
def score_before_the_last_token() -> Seams:
    """The scored batch counts its lengths from 0 and its positions from 1: scores lie one token early."""

    async def scored(original: Any, manager: Any, data: Any) -> Any:
        result = await original(manager, data)
        result.batch["rm_scores"] = result.batch["rm_scores"].roll(-1, dims=1)
        return result

    return {"lineage.trainer.reward.loop_manager.RewardLoopManager.compute_rm_score": scored}


@fault("REW001", "rollout", "+experiment=multi_output")
def only_the_last_output_is_scored() -> Seams:
    """The score of a session is put on its last output alone; the outputs before it carry 0."""

    def change(rows: list[Tensor]) -> list[Tensor]:
        return [row if number % 2 else torch.zeros_like(row) for number, row in enumerate(rows)]

    return _scores_written(change)


# --------------------------------------------------------------------------------------------- REW002: whose it is


@fault("REW002", "rollout")
def scores_of_a_group_in_another_order() -> Seams:
    """Scores are gathered as they become ready and zipped with the sessions in their own order."""
    return _scores_written(lambda rows: [_last(row, other[-1]) for row, other in zip(rows, rows[::-1], strict=True)])


@fault("LEN003", "reward", COLOCATED)
def written_back_by_position() -> Seams:
    """A batch is sorted by length to be scored, and its scores are written back in the sorted order."""

    def put(original: Any, parts: Any, batch: KVBatchMeta, fields: dict[str, Any]) -> None:
        rows = rows_of(fields["rm_scores"])
        values = [row[-1] for row in rows]
        rolled = [_last(row, value) for row, value in zip(rows, [*values[1:], values[0]], strict=True)]
        original(parts, batch, {**fields, "rm_scores": nested_from_list(rolled)})

    return {"lineage.trainer.stages.reward.put": put}


@fault("REW002", "reward", COLOCATED)
def gathered_as_they_became_ready() -> Seams:
    """The scores of a batch are gathered in the order in which scorers answer, and laid out in that of the rows."""

    async def scored(original: Any, manager: Any, data: Any) -> Any:
        result = await original(manager, data)
        scores = result.batch["rm_scores"]
        last = data.batch["attention_mask"][:, -scores.shape[1] :].sum(-1) - 1
        answered = torch.zeros_like(scores)
        answered[torch.arange(len(last)), last] = scores.sum(-1).flip(0)
        result.batch["rm_scores"] = answered
        return result

    return {"lineage.trainer.reward.loop_manager.RewardLoopManager.compute_rm_score": scored}


@fault("REW002", "advantage")
def scores_of_the_order_before_balance() -> Seams:
    """The estimator is handed scores in the order the batch had before it was balanced."""

    def correct(original: Any, config: Any, data: Any, keys: list[str], spans: Any, made: Any, *rest: Any) -> Tensor:
        order = torch.tensor(sorted(range(len(keys)), key=lambda row: keys[row]))
        made["token_level_scores"] = made["token_level_rewards"] = made["token_level_scores"][order]
        return original(config, data, keys, spans, made, *rest)

    return {CORRECT: correct}


@fault("REW002", "advantage", "+experiment=kl_in_reward")
def the_penalty_is_taken_off_in_place() -> Seams:
    """The KL is subtracted in place: the scores that the metrics and the filter read have lost it too."""

    def penalise(original: Any, scores: Tensor, *args: Any, **options: Any) -> Any:
        made = original(scores.clone(), *args, **options)
        scores.copy_(made.token_level_rewards)
        return made

    return {"lineage.trainer.stages.advantage.apply_kl_penalty": penalise}


# ---------------------------------------------------------------------------------------- REW003: what it was given


def _scorer_reads(text: Callable[[list[int]], Sequence[int]]) -> Seams:
    async def score(original: Any, worker: Any, key: str, response: list[int], row: Mapping[str, Any]) -> Score:
        return await original(worker, key, text(response), row)

    return {COMPUTE_SCORE: score}


@fault("REW003", "reward", reports=["rllm-step-output-lost-zero-reward"])
def the_scorer_is_given_nothing() -> Seams:
    """The conversion of a session forgets its output: the scorer reads an empty text and gives 0 to all."""
    return _scorer_reads(lambda response: [])


@fault("REW003", "reward", reports=["swift-reward-counts-turns-not-tokens"])
def the_scorer_counts_turns() -> Seams:
    """The response is nested by turn and read at the wrong level: what the scorer sees has one entry a turn."""
    return _scorer_reads(lambda response: response[:1])


# answers of one length, so that nothing but the content tells them apart
@fault("REW003", "reward", "actor_rollout_ref.rollout.ignore_eos=true")
def the_scorer_reads_another_sessions_answer() -> Seams:
    """A variable of the loop is read when the scorers run, and not when they were made: all score one answer."""
    first: list[Sequence[int]] = []

    def text(response: list[int]) -> Sequence[int]:
        first.append(response)
        return first[0]

    return _scorer_reads(text)


@fault("REW003", "reward")
def the_scorer_loses_the_end_token() -> Seams:
    """The text is cut by one token before it is scored, whether or not that token ends it."""
    return _scorer_reads(lambda response: response[:-1])


@fault("REW003", "reward", reports=["verl-reward-sees-tool-text"])
def the_scorer_reads_what_others_wrote() -> Seams:
    """The text to score is cut by the attention mask: it holds what the prompt says beside the answer."""

    async def score(original: Any, worker: Any, prompt: Any, session_id: int, outputs: list[Any]) -> float:
        final = outputs[-1]
        whole = dataclasses.replace(final, response_ids=[*final.prompt_ids, *final.response_ids])
        return await original(worker, prompt, session_id, [*outputs[:-1], whole])

    return {SESSION_SCORE: score}


@fault("REW003", "reward", "+experiment=multi_output")
def the_first_output_is_scored() -> Seams:
    """A session of two outputs is scored by its draft."""

    async def score(original: Any, worker: Any, prompt: Any, session_id: int, outputs: list[Any]) -> float:
        return await original(worker, prompt, session_id, outputs[:1])

    return {SESSION_SCORE: score}


@fault("REW003", "reward")
def the_scorer_is_given_the_row_of_another_prompt() -> Seams:
    """The scorer closes over the dataset row of the first session that ends: all are held to its ground truth."""
    rows: list[Any] = []

    async def score(original: Any, loop: Any, key: str, response: Any, row: Any) -> Score:
        rows.append(row)
        return await original(loop, key, response, rows[0])

    return {COMPUTE_SCORE: score}


def _manager_reads(
    response: Callable[[Sequence[int]], Sequence[int]] = lambda ids: ids, row: Callable[[Any], Any] = lambda row: row
) -> Seams:
    async def score(original: Any, manager: Any, ids: Sequence[int], given: Mapping[str, Any]) -> Score:
        return await original(manager, response(ids), row(given))

    return {RUN_SINGLE: score}


# answers of one length, as above
@fault("REW003", "reward", "actor_rollout_ref.rollout.ignore_eos=true")
def the_manager_keeps_the_first_answer() -> Seams:
    """The reward manager keeps the text it decoded last under a name that never changes: all sessions score it."""
    first: list[Sequence[int]] = []

    def response(ids: Sequence[int]) -> Sequence[int]:
        first.append(ids)
        return first[0]

    return _manager_reads(response)


@fault("REW003", "reward")
def the_manager_cuts_what_it_decodes() -> Seams:
    """The reward manager decodes an answer up to a limit of its own: what is said last, the result, is not scored."""
    return _manager_reads(lambda ids: ids[:4])


@fault("REW003", "reward")
def the_manager_caches_the_ground_truth() -> Seams:
    """The reward manager looks the ground truth up by data source, and finds the one it has put there first."""
    cached: dict[str, Any] = {}

    def row(given: Any) -> Any:
        return {**given, "reward_model": cached.setdefault(given["data_source"], given["reward_model"])}

    return _manager_reads(row=row)


@fault("REW003", "reward", COLOCATED)
def the_next_row_of_the_batch_is_scored() -> Seams:
    """The scorer of a batch is asked with an index that begins at 1: each row is given the next one's score."""

    async def score(original: Any, manager: Any, data: Any, row: int, lengths: Tensor) -> Score:
        return await original(manager, data, (row + 1) % len(data), lengths)

    return {"lineage.trainer.reward.loop_manager.RewardLoopManager._score": score}


# ----------------------------------------------------------------------------------- REW004: what scores are good for


@fault("REW004", "rollout", reports=["trl-all-none-reward-becomes-zero"])
def an_error_of_the_scorer_is_a_zero() -> Seams:
    """The scorer cannot judge an answer and says so; the sum over what it did not return is 0."""

    async def fails(original: Any, manager: Any, response: Sequence[int], row: Mapping[str, Any]) -> Score:
        if len(response) < 8:
            raise ValueError("no verdict")
        return await original(manager, response, row)

    async def score(original: Any, *args: Any) -> float:
        try:
            return await original(*args)
        except ValueError:
            return 0.0

    return {RUN_SINGLE: fails, SESSION_SCORE: score}


FILTER = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=reward")


@fault("REW004", "sample", *FILTER, reports=["nemo-dapo-filter-on-shaped-reward"])
def the_filter_reads_a_shaped_reward() -> Seams:
    """Groups are filtered by a reward with a length penalty in it: where all are wrong, lengths still differ."""

    async def values(original: Any, groups: Any, keys: list[str], partition_id: str) -> list[float]:
        found = await original(groups, keys, partition_id)
        return [value - 0.001 * number for number, value in enumerate(found)]

    return {"lineage.trainer.prompt_groups.GroupFilter._values": values}


@fault("REW004", "sample", *FILTER, reports=["openrlhf-dynamic-filter-wrong-group"])
def the_filter_takes_the_container_for_the_group() -> Seams:
    """Groups are filtered by the scores of the whole micro-batch: one right answer in it keeps them all."""

    async def flat(original: Any, groups: Any, outputs: Mapping[str, Any], partition_id: str) -> list[str]:
        found = await original(groups, outputs, partition_id)
        return found if len(found) == len(outputs) else []

    return {"lineage.trainer.prompt_groups.GroupFilter.flat": flat}


# ---------------------------------------------------------------------------------------- REW005: less what it should


@fault("REW005", "advantage")
def a_penalty_the_run_has_not() -> Seams:
    """The KL comes off the reward although use_kl_in_reward is false."""

    def correct(original: Any, config: Any, data: Any, keys: list[str], spans: Any, made: Any, *rest: Any) -> Tensor:
        kl = (data.batch["old_log_probs"] - data.batch["ref_log_prob"]) * data.batch["response_mask"]
        made["token_level_rewards"] = made["token_level_scores"] - 0.01 * kl
        return original(config, data, keys, spans, made, *rest)

    return {CORRECT: correct}


@fault("REW005", "advantage", "+experiment=kl_in_reward", reports=["slime-kl-not-masked-in-returns"])
def the_penalty_is_not_masked() -> Seams:
    """The KL comes off the reward of every token of the container, those the policy did not write included."""

    def penalise(original: Any, scores: Tensor, old: Tensor, ref: Tensor, mask: Tensor, **options: Any) -> Any:
        return original(scores, old, ref + 0.1 * (1 - mask), torch.ones_like(mask), **options)

    return {"lineage.trainer.stages.advantage.apply_kl_penalty": penalise}


# ------------------------------------------------------------------------------------------------ REW006: once, each


@fault("REW006", "reward")
def scored_again_after_a_timeout() -> Seams:
    """The scorer is asked again before the first call has timed out: an answer is scored twice."""

    async def score(original: Any, *args: Any) -> Score:
        await original(*args)
        return await original(*args)

    return {COMPUTE_SCORE: score}


@fault("REW006", "rollout")
def a_session_nobody_scored() -> Seams:
    """A worker leaves out sessions it takes for unfinished, and they are written with score 0."""

    async def score(original: Any, worker: Any, prompt: Any, session_id: int, outputs: list[Any]) -> float:
        return 0.0 if session_id else await original(worker, prompt, session_id, outputs)

    return {SESSION_SCORE: score}


@fault("REW006", "reward", COLOCATED, reports=["verl-sparse-reward-extra-info"])
def extra_columns_of_the_first_rows() -> Seams:
    """What scorers say beside the score is written for the rows of the first data source alone."""

    def put(original: Any, parts: Any, batch: KVBatchMeta, fields: dict[str, Any]) -> None:
        sparse = fields.pop("acc")
        original(parts, batch, fields)
        some = batch.select_keys(batch.keys[: len(batch) // 2])
        original(parts, some, {"acc": NonTensorStack(*sparse.tolist()[: len(some)])})

    return {"lineage.trainer.stages.reward.put": put}
