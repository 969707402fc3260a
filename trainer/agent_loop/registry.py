"""Agent loops by the name a dataset row gives in ``agent_name``."""

from __future__ import annotations

from collections.abc import Callable

from lineage.trainer.agent_loop.base import AgentLoopBase, AgentLoopError

AGENT_LOOPS: dict[str, type[AgentLoopBase]] = {}


def register(name: str) -> Callable[[type[AgentLoopBase]], type[AgentLoopBase]]:
    """Class decorator: make a loop known by ``name`` (verl ``register``)."""

    def add(loop: type[AgentLoopBase]) -> type[AgentLoopBase]:
        AGENT_LOOPS[name] = loop
        return loop

    return add


def agent_loop(name: str) -> type[AgentLoopBase]:
    """The loop of that name.

    Raises:
        AgentLoopError: no such loop; the message lists those there are.
    """
    if name not in AGENT_LOOPS:
        raise AgentLoopError(f"unknown agent loop {name!r}: known are {', '.join(sorted(AGENT_LOOPS))}")
    return AGENT_LOOPS[name]
