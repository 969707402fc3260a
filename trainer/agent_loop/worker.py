"""Runs the sessions of prompts, scores them and writes them to the queue (verl ``AgentLoopWorkerTQ``)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from lineage import hooks
from lineage.hooks import LineageError, TrajectoryKey, UserError, first_line, traced
from lineage.trainer.agent_loop.base import AgentLoopOutput, LoopContext, Session, SessionError
from lineage.trainer.agent_loop.postprocess import (
    CARRIED,
    CARRIED_UNSCORED,
    SessionResult,
    check_outputs,
    trajectory_fields,
    trajectory_tag,
)
from lineage.trainer.agent_loop.registry import agent_loop
from lineage.trainer.agent_loop.turns import record_turns
from lineage.trainer.protocol import DataProto
from lineage.trainer.reward.loop import record_own_score
from lineage.trainer.reward.manager import Score
from lineage.trainer.rollout.base import SamplingParams

logger = logging.getLogger(__name__)


class SessionScorer(Protocol):
    """Scores the final output of a session (``reward.RewardLoopWorker``)."""

    async def compute_score(self, key: str, response_ids: list[int], row: Mapping[str, Any]) -> Score:
        """Reward of the trajectory ``key``: the response decoded and judged by the row's ground truth."""
        ...


@dataclass(frozen=True)
class Prompt:
    """One prompt group to run.

    Attributes:
        uid: prompt key.
        row: fields of the dataset row.
        expected: sessions to run.
    """

    uid: str
    row: dict[str, Any]
    expected: int
    global_steps: int
    partition_id: str
    sampling_params: SamplingParams


class AgentLoopWorker:
    """A share of the batch's prompts: every session of every prompt runs at the same time.

    Args:
        queue: TransferQueue's interface.
        context: engine, tokenizer and limits, handed to each loop.
        scorer: reward worker; None leaves sessions unscored (a colocated reward comes later).
        default_agent_loop: loop of a row without ``agent_name``.
        seed: the run's seed.
    """

    def __init__(
        self, queue: Any, context: LoopContext, scorer: SessionScorer | None, *, default_agent_loop: str, seed: int
    ) -> None:
        self.queue = queue
        self.context = context
        self.scorer = scorer
        self.carried = CARRIED if scorer is not None else CARRIED_UNSCORED
        self.default_agent_loop = default_agent_loop
        self.seed = seed

    @traced("rollout", component="AgentLoopWorker.run", consumer="ReplayBuffer.sample")
    async def run(self, batch: DataProto) -> None:
        """Run all sessions of a batch of prompts (see ``AgentLoopManager.generate_sequences``).

        Raises:
            UserError: a session met a mistake of the user's; its group is marked failed first.
        """
        columns, meta = batch.non_tensor_batch, batch.meta_info
        uids = [str(uid) for uid in columns["uid"]]
        hooks.current().consume(
            {"raw_prompt": list(columns["raw_prompt"])}, keys=uids, entity="prompt", producer="RLHFDataset.__getitem__"
        )
        prompts = [
            Prompt(
                uid=uid,
                row={name: column[place] for name, column in columns.items()},
                expected=meta["expected"],
                global_steps=meta["global_steps"],
                partition_id=meta["partition_id"],
                sampling_params=meta["sampling_params"],
            )
            for place, uid in enumerate(uids)
        ]
        running = [asyncio.create_task(self._run_prompt(prompt)) for prompt in prompts]
        try:
            await asyncio.gather(*running)
        finally:  # when one ends in an error the others must not write on behind the run's back
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _run_prompt(self, prompt: Prompt) -> None:
        """Run one group; it is ``finished`` when every session is in the queue, else ``failure``.

        Outputs of the sessions that succeed are written even when another one fails. The status comes last, once every
        session has settled: nobody may write to a group that the replay buffer can clear.
        """
        await self._tag(prompt, status="running")
        sessions = [self._run_session(prompt, session_id) for session_id in range(prompt.expected)]
        results = await asyncio.gather(*sessions, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        settled = [result for result in results if isinstance(result, SessionResult)]
        try:
            await self._agent_loop_postprocess(prompt, settled)
        except Exception as error:  # outputs that no row can be made of: the group fails, the run goes on
            errors.append(error)
        else:  # what became of the group is settled: the trace cannot change it
            record_turns(*_keyed_outputs(prompt, settled))
        if not errors:
            await self._tag(prompt, status="finished")
            return
        first = errors[0]
        await self._tag(prompt, status="failure", reason="failed", error=f"{type(first).__name__}: {first}")
        for failed in errors:
            # a mistake of the user's or an interrupt is no failed session: the run must stop and say so
            if isinstance(failed, UserError) or not isinstance(failed, Exception):
                raise failed
        logger.warning("prompt %s: %d of %d sessions failed: %s", prompt.uid, len(errors), prompt.expected, first)

    async def _run_session(self, prompt: Prompt, session_id: int) -> SessionResult:
        session = Session(prompt.uid, session_id, prompt.global_steps, self.seed)
        named = prompt.row.get("agent_name")  # a table that names it in some rows has None or NaN in the others
        name = named if isinstance(named, str) and named else self.default_agent_loop
        loop = agent_loop(name)
        with _of_the_session(name):
            result = await loop(self.context, session).run(prompt.sampling_params, **prompt.row)
            outputs = check_outputs(result if isinstance(result, list) else [result], self.context.vocab_size)
        with _of_the_session("reward"):
            return SessionResult(session_id, outputs, await self._compute_score(prompt, session_id, outputs))

    async def _compute_score(self, prompt: Prompt, session_id: int, outputs: list[AgentLoopOutput]) -> float | None:
        """Score of the session, by its last output: the loop's own, or the reward worker's.

        What the scorer returned beside the score becomes ``reward_extra_info`` of every output's ``extra_fields``.
        """
        final = outputs[-1]
        key = str(TrajectoryKey(prompt.uid, session_id, len(outputs) - 1))
        if final.reward_score is not None:
            return record_own_score(key, float(final.reward_score), prompt.row)
        if self.scorer is None:
            return None
        result = await self.scorer.compute_score(key, final.response_ids, prompt.row)
        for output in outputs:
            output.extra_fields["reward_extra_info"] = result.reward_extra_info
        return result.score

    async def _agent_loop_postprocess(self, prompt: Prompt, results: Sequence[SessionResult]) -> None:
        """Write the outputs of the group's sessions under ``{uid}_{session_id}_{index}``, in one put.

        A put costs the queue the same for one row as for a group, and nobody may read a group before it is whole.
        """
        if not results:
            return
        keys, outputs = _keyed_outputs(prompt, results)
        await self.queue.async_kv_batch_put(
            keys=keys,
            partition_id=prompt.partition_id,
            fields=trajectory_fields(prompt.uid, results, prompt.row, self.carried),
            tags=[trajectory_tag(output, prompt.global_steps) for output in outputs],
        )

    async def _tag(self, prompt: Prompt, **tag: Any) -> None:
        await self.queue.async_kv_put(key=prompt.uid, partition_id=prompt.partition_id, tag=tag)


@contextmanager
def _of_the_session(whose: str) -> Iterator[None]:
    """What a user's code raises, ``sys.exit`` too, as one line that names the code; it fails this session alone.

    Raises:
        SessionError: something was raised that is no mistake the run must stop for.
    """
    try:
        yield
    except SessionError as error:
        raise SessionError(f"{whose}: {error}") from error
    except LineageError:
        raise
    except (Exception, SystemExit) as error:
        raise SessionError(f"{whose}: {type(error).__name__}: {first_line(error)}") from error


def _keyed_outputs(prompt: Prompt, results: Sequence[SessionResult]) -> tuple[list[str], list[AgentLoopOutput]]:
    """The trajectory key of each output of a group, and the outputs."""
    outputs = [(result.session_id, index, one) for result in results for index, one in enumerate(result.outputs)]
    keys = [str(TrajectoryKey(prompt.uid, session_id, index)) for session_id, index, _ in outputs]
    return keys, [one for _, _, one in outputs]
