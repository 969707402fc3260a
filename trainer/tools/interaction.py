"""An interaction answers the policy as a user would, until it is content (verl ``BaseInteraction``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class BaseInteraction:
    """One object serves every session; what a session needs to remember is kept by instance id.

    Args:
        config: ``config`` of its entry in ``multi_turn.interaction_config_path``.
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.config = dict(config or {})

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> str:
        """Begin a session.

        Args:
            kwargs: the row's ``extra_info.interaction_kwargs``, its ``name`` included.

        Returns:
            The instance id.
        """
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        """Answer the policy's last message.

        Args:
            messages: the conversation, the policy's last message included.

        Returns:
            Whether the session ends here (the answer is then not shown), the answer, the reward of the turn (kept in
            ``turn_scores``; None is none) and metrics.
        """
        raise NotImplementedError

    async def finalize_interaction(self, instance_id: str) -> None:
        """End a session, also one that raised."""
