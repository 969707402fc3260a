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
    MultiTurn,
    Session,
    SessionError,
)
from lineage.trainer.agent_loop.draft_revise import DraftReviseAgentLoop
from lineage.trainer.agent_loop.flaky import FlakyAgentLoop
from lineage.trainer.agent_loop.manager import AgentLoopManager, agent_loop_manager_class
from lineage.trainer.agent_loop.registry import AGENT_LOOPS, agent_loop, register, register_agent_loops
from lineage.trainer.agent_loop.single_turn import SingleTurnAgentLoop
from lineage.trainer.agent_loop.tool_agent import ToolAgentLoop
from lineage.trainer.agent_loop.turns import Turn
from lineage.trainer.agent_loop.worker import AgentLoopWorker

__all__ = [
    "AGENT_LOOPS",
    "AgentLoopBase",
    "AgentLoopError",
    "AgentLoopManager",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "AgentLoopWorker",
    "DraftReviseAgentLoop",
    "FlakyAgentLoop",
    "LoopContext",
    "MultiTurn",
    "Session",
    "SessionError",
    "SingleTurnAgentLoop",
    "ToolAgentLoop",
    "Turn",
    "agent_loop",
    "agent_loop_manager_class",
    "register",
    "register_agent_loops",
]
