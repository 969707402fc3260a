"""cli: the command line. What enters: arguments. What leaves: text, JSON and an exit code.

One module a command. Imports all of the other folders; nothing imports it. Only ``lineage run`` imports torch, and only
when it runs. ``app`` is the Typer application, ``main`` the program; both are loaded when they are first used.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lineage.cli.commands import app as app

__all__ = ["app", "main"]


def main() -> None:
    """Load the commands and run one; a Ctrl-C while they load, or a broken package, is no traceback either."""
    try:
        from lineage.cli.commands import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    except ImportError as error:
        print(f"error: {error}; mend the base: pip install --force-reinstall rl-lineage", file=sys.stderr)
        sys.exit(2)
    run()


def __getattr__(name: str) -> Any:
    if name == "app":
        from lineage.cli.commands import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
