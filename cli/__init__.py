"""cli: the command line. What enters: arguments. What leaves: text, JSON and an exit code.

One module a command. Imports all of the other folders; nothing imports it. Only ``lineage run`` imports torch, and only
when it runs.
"""

from __future__ import annotations

from lineage.cli.app import app, main

__all__ = ["app", "main"]
