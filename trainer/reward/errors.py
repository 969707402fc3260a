"""The errors of a reward that cannot be computed."""

from __future__ import annotations

from lineage.hooks import LineageError, UserError


class RewardError(UserError):
    """An unknown scorer, a custom function that cannot be loaded, or one that returned no score."""


class ScoreError(LineageError):
    """A score no advantage can be computed from, of one response: in the agent loop its session fails."""
