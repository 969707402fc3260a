"""The error of a configuration that cannot run."""

from __future__ import annotations

from lineage.hooks import UserError


class ConfigError(UserError):
    """A configuration that cannot run: one line that names the key, what is wrong and what is supported."""
