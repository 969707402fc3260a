"""Agent loops: one prompt row in, the outputs of its sessions in the queue.

Enters: prompt rows with a uid, the rollout engine, the reward worker. Leaves: trajectory fields and tags in the queue,
and the status of each prompt. Imported by the trainer; a loop of your own subclasses AgentLoopBase and registers.
"""

from lineage.trainer.agent_loop.base import (
    AgentLoopBase,
    AgentLoopError,
    AgentLoopMetrics,
    AgentLoopOutput,
    LoopContext,
    Session,
)
from lineage.trainer.agent_loop.manager import AgentLoopManager
from lineage.trainer.agent_loop.registry import AGENT_LOOPS, agent_loop, register
from lineage.trainer.agent_loop.single_turn import SingleTurnAgentLoop
from lineage.trainer.agent_loop.worker import AgentLoopWorker

__all__ = [
    "AGENT_LOOPS",
    "AgentLoopBase",
    "AgentLoopError",
    "AgentLoopManager",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "AgentLoopWorker",
    "LoopContext",
    "Session",
    "SingleTurnAgentLoop",
    "agent_loop",
    "register",
]
