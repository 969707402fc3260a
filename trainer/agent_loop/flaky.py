"""A loop that fails on purpose: a seeded share of the sessions of another loop raises or answers nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lineage.trainer.agent_loop.base import AgentLoopBase, AgentLoopError, AgentLoopOutput, LoopContext, Session
from lineage.trainer.agent_loop.registry import agent_loop, register
from lineage.trainer.rollout.base import SamplingParams

_NAME = "flaky_agent"
_OPTIONS = ("failure_rate", "empty_rate", "inner")
_DRAW = -1  # no turn has this number: the inner loop's random numbers stay its own


class FlakyError(RuntimeError):
    """The failure that was asked for."""


@register(_NAME)
class FlakyAgentLoop(AgentLoopBase):
    """Runs ``inner``; which sessions fail is drawn from the session's own seed, so every run fails in the same ones.

    A row's ``extra_info.interaction_kwargs`` may set the three arguments for its prompt.

    Args:
        failure_rate: share of sessions that raise, before the inner loop runs.
        empty_rate: share of sessions whose last response has no token.
        inner: name of the loop that runs.
    """

    def __init__(
        self,
        context: LoopContext,
        session: Session,
        *,
        failure_rate: float = 0.1,
        empty_rate: float = 0.0,
        inner: str = "single_turn_agent",
    ) -> None:
        super().__init__(context, session)
        self.failure_rate, self.empty_rate, self.inner = failure_rate, empty_rate, inner

    async def run(self, sampling_params: SamplingParams, **row: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """See :meth:`AgentLoopBase.run`.

        Raises:
            FlakyError: in the share of sessions that raises.
            AgentLoopError: rates outside 0..1, or ``inner`` is this loop.
        """
        extra = row.get("extra_info")
        given = extra.get("interaction_kwargs") if isinstance(extra, Mapping) else None
        options = {name: getattr(self, name) for name in _OPTIONS}
        options.update({name: given[name] for name in _OPTIONS if given and name in given})
        failure, empty = _rates(options["failure_rate"], options["empty_rate"])
        if options["inner"] == _NAME:
            raise AgentLoopError(f"{_NAME}: inner={_NAME} would wrap itself")
        draw = self.session.draw_seed(_DRAW) / 2**63
        if draw < failure:
            raise FlakyError(f"session {self.session.session_id} fails, as failure_rate={failure} asks")
        inner = agent_loop(options["inner"])(self.context, self.session)
        result = await inner.run(sampling_params, **row)
        if draw >= failure + empty or not result:
            return result
        outputs = result if isinstance(result, list) else [result]
        log_probs: list[float] | None = None if outputs[-1].response_logprobs is None else []
        outputs[-1] = replace(outputs[-1], response_ids=[], response_mask=[], response_logprobs=log_probs)
        return outputs if isinstance(result, list) else outputs[-1]


def _rates(failure: Any, empty: Any) -> tuple[float, float]:
    try:
        failure, empty = float(failure), float(empty)
    except (TypeError, ValueError):
        failure = empty = -1.0
    if not (failure >= 0 and empty >= 0 and failure + empty <= 1):
        raise AgentLoopError(f"{_NAME}: failure_rate and empty_rate are shares of the sessions, together 0 to 1")
    return failure, empty
