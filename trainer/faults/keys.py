"""Faults of identity: keys, groups, the order of rows, and whose prompt and whose answer a row holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tensordict import TensorDict

from lineage.trainer.batching.balance import Balance
from lineage.trainer.faults.registry import Seams, fault
from lineage.trainer.faults.seams import TRAJECTORY_FIELDS
from lineage.trainer.protocol import DataProto, KVBatchMeta
from lineage.trainer.rollout.sampling import Drawn

WORKER = "lineage.trainer.agent_loop.worker.AgentLoopWorker"
REORDER = "lineage.trainer.protocol.KVBatchMeta.reorder"
DECODE = "lineage.trainer.rollout.hf.decode"


@fault("KEY001", "rollout")
def uids_lose_their_dashes() -> Seams:
    """The uid column is normalised on its way to the queue: groups stay whole, and no row can be joined to its key."""

    def write(original: Any, uid: str, *rest: Any) -> TensorDict:
        return original(uid.replace("-", ""), *rest)

    return {TRAJECTORY_FIELDS: write}


@fault("KEY001", "rollout")
def uid_of_the_first_group() -> Seams:
    """The uid column is filled from the first row of the batch: groups are written with another group's uid."""
    first: list[str] = []

    def write(original: Any, uid: str, *rest: Any) -> TensorDict:
        first.append(uid)
        return original(first[0], *rest)

    return {TRAJECTORY_FIELDS: write}


@fault("KEY002", "sample")
def lost_session() -> Seams:
    """The replay buffer forgets one session of a group: the step trains on what is left and says nothing."""

    async def materialize(original: Any, buffer: Any, uids: list[str], *rest: Any) -> KVBatchMeta:
        buffer._outputs[uids[-1]].pop()
        return await original(buffer, uids, *rest)

    return {"lineage.trainer.replay_buffer.ReplayBuffer._materialize_batch": materialize}


@fault("KEY002", "sample", reports=["verl-validation-repeat-mismatch"])
def engine_expands_by_another_n() -> Seams:
    """The engine expands prompts by a sampling setting of its own: groups hold one session more than is declared."""

    async def run(original: Any, worker: Any, prompt: Any) -> None:
        await original(worker, replace(prompt, expected=prompt.expected + 1))

    return {f"{WORKER}._run_prompt": run}


@fault("KEY002", "sample", "+experiment=multi_output", reports=["areal-multi-turn-ids-vs-seqlens"])
def ids_of_a_fixed_number() -> Seams:
    """The ids of a group are a list of fixed size, for so many outputs a session: later sessions are numbered on."""

    def key(original: Any, uid: str, session_id: int, index: int) -> Any:
        return original(uid, session_id, index + 2 * session_id)

    return {"lineage.trainer.agent_loop.worker.TrajectoryKey": key}


@fault("KEY003", "balance")
def tags_left_behind() -> Seams:
    """The balance reorders the keys of the batch and leaves their tags where they were."""

    def reorder(original: Any, batch: KVBatchMeta, order: list[int]) -> None:
        tags = list(batch.tags)
        original(batch, order)
        batch.tags = tags

    return {REORDER: reorder}


@fault("KEY003", "balance", reports=["openrlhf-ragged-experience-dropped"])
def zip_of_ragged_shards() -> Seams:
    """The shards of the ranks are zipped together, and zip ends with the shortest: the rows beyond it are gone."""

    def balance(original: Any, seq_lens: Any, dp_size: int) -> Balance:
        whole = original(seq_lens, dp_size)
        return replace(whole, order=whole.order[: len(whole.order) // 2])

    def reorder(_: Any, batch: KVBatchMeta, order: list[int]) -> None:
        batch.keys, batch.tags = [batch.keys[row] for row in order], [batch.tags[row] for row in order]

    return {"lineage.trainer.stages.balance.balance_rows": balance, REORDER: reorder}


@fault("KEY003", "balance", reports=["tq-batchmeta-shallow-copy"])
def padding_shares_its_tag() -> Seams:
    """A padding row is made with a shallow copy of a real row's tag: what is written to one is written to the other."""

    def make(original: Any, count: int, like: dict[str, Any], **options: Any) -> Any:
        rows = original(count, like, **options)
        like.update(is_padding=True)
        return rows

    return {"lineage.trainer.stages.balance.padding_rows": make}


@fault("KEY004", "rollout", "+experiment=bypass", "data.max_response_length=16")
def gather_returns_one_rank() -> Seams:
    """The gather of the completions returns the first rank's for every rank: answers are copies of other prompts'."""

    def decode(original: Any, *args: Any, **options: Any) -> Drawn:
        drawn = original(*args, **options)
        half = len(drawn.token_ids) // 2
        rows = [*range(half), *range(half)][: len(drawn.token_ids)]
        return Drawn(*([column[row] for row in rows] for column in (drawn.token_ids, drawn.log_probs, drawn.finished)))

    return {DECODE: decode}


@fault("KEY004", "rollout", "data.max_response_length=16", reports=["torchtune-buffer-counts-rows"])
def buffer_of_one_row() -> Seams:
    """The buffer's capacity counts rows, not batches: what is drawn from it for the last prompt is the first one's
    answer."""

    def decode(original: Any, *args: Any, **options: Any) -> Drawn:
        drawn = original(*args, **options)
        columns = (drawn.token_ids, drawn.log_probs, drawn.finished)
        return Drawn(*([*column[:-1], column[0]] for column in columns))

    return {DECODE: decode}


@fault("KEY008", "rollout")
def keys_tile_where_prompts_repeat() -> Seams:
    """Prompts are repeated in place and their keys are tiled: the sessions of one uid run on different prompts."""
    seen: dict[str, Any] = {}

    async def run(original: Any, worker: Any, batch: DataProto) -> None:
        columns = batch.non_tensor_batch
        rows = [{name: column[place] for name, column in columns.items()} for place in range(len(batch))]
        seen.update(rows=rows, place={str(uid): place for place, uid in enumerate(columns["uid"])})
        await original(worker, batch)

    async def session(original: Any, worker: Any, prompt: Any, session_id: int) -> Any:
        flat = session_id * len(seen["rows"]) + seen["place"][prompt.uid]
        return await original(worker, replace(prompt, row=seen["rows"][flat // prompt.expected]), session_id)

    return {f"{WORKER}.run": run, f"{WORKER}._run_session": session}


@fault("KEY008", "rollout", reports=["trl-vllm-output-not-matching-prompt"])
def completions_rolled_by_one() -> Seams:
    """The finished sessions are rolled by one before each rank takes its slice: a row holds the answer to the prompt
    before it, and that prompt."""
    before: list[Any] = []

    def check(original: Any, outputs: Any, *rest: Any) -> Any:
        before.append(original(outputs, *rest))
        return before[max(0, len(before) - 2)]

    return {"lineage.trainer.agent_loop.worker.check_outputs": check}


@fault("KEY008", "rollout")
def uids_rolled_against_prompts() -> Seams:
    """The prompts are shuffled once more after they were given their uids: each uid runs on another dataset row."""

    def generate(original: Any, manager: Any, batch: DataProto) -> None:
        uids = batch.non_tensor_batch["uid"]
        batch.non_tensor_batch["uid"] = uids[[*range(1, len(uids)), 0]]
        original(manager, batch)

    return {"lineage.trainer.agent_loop.manager.AgentLoopManager.generate_sequences": generate}


@fault("KEY008", "rollout")
def closure_over_the_first_prompt() -> Seams:
    """The request is built in a closure over the first prompt of the batch: every session is sent that one."""
    first: list[Any] = []

    async def session(original: Any, worker: Any, prompt: Any, session_id: int) -> Any:
        first.append(prompt)
        return await original(worker, replace(prompt, row=first[0].row), session_id)

    return {f"{WORKER}._run_session": session}


@fault("KEY008", "rollout")
def dataset_columns_of_the_next_row() -> Seams:
    """The dataset columns that go with a trajectory are read at an index one too high: they are the next prompt's."""
    seen: list[Any] = []

    async def run(original: Any, worker: Any, batch: DataProto) -> None:
        columns = batch.non_tensor_batch
        seen[:] = [{name: column[place] for name, column in columns.items()} for place in range(len(batch))]
        await original(worker, batch)

    def write(original: Any, uid: str, results: Any, row: Any, carried: Any) -> TensorDict:
        place = next(place for place, other in enumerate(seen) if other["uid"] == row["uid"])
        return original(uid, results, seen[(place + 1) % len(seen)], carried)

    return {f"{WORKER}.run": run, TRAJECTORY_FIELDS: write}


@fault("KEY008", "rollout")
def ground_truths_rolled_against_prompts() -> Seams:
    """The column of ground truths is gathered one place off: each prompt is asked, and scored by the next one's."""

    async def run(original: Any, worker: Any, batch: DataProto) -> None:
        columns = dict(batch.non_tensor_batch)
        columns["reward_model"] = np.roll(columns["reward_model"], -1)
        await original(worker, DataProto(batch.batch, columns, batch.meta_info))

    return {f"{WORKER}.run": run}


@fault("KEY009", "rollout", onwards=True, reports=["trl-seed-not-reaching-engine"])
def one_seed_for_all_sessions() -> Seams:
    """The engine is seeded by its rank alone: every session of a group draws the same tokens."""

    def draw_seed(original: Any, session: Any, turn: int) -> int:
        return original(replace(session, session_id=0), turn)

    return {"lineage.trainer.agent_loop.base.Session.draw_seed": draw_seed}


@fault("KEY009", "rollout")
def group_generated_once() -> Seams:
    """The engine answers a prompt it has just been asked from its cache: later sessions of a group are copies, whatever
    their seeds."""

    def decode(original: Any, module: Any, prompts: Sequence[Sequence[int]], *rest: Any, **options: Any) -> Drawn:
        drawn = original(module, prompts, *rest, **options)
        rows = [list(prompts).index(prompt) for prompt in prompts]
        return Drawn(*([column[row] for row in rows] for column in (drawn.token_ids, drawn.log_probs, drawn.finished)))

    return {DECODE: decode}
