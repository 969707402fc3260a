"""The errors of a reward that cannot be computed."""

from __future__ import annotations

from lineage.hooks import UserError


class RewardError(UserError):
    """An unknown scorer, a custom function that cannot be loaded, or one that returned no score."""
