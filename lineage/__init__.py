"""Flight recorder and inspector for RL post-training steps.

Enters: batches, as the verbs of a recorder; leaves: a Parquet trace, and verdicts on it. ``import lineage`` is light:
each public name is loaded when it is first used, and neither torch nor ray is ever imported by it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lineage import testing as testing
    from lineage.checks import check as check
    from lineage.hooks import recording as record
    from lineage.traces import open_trace as open

__version__ = "0.1.0"

_LAZY: dict[str, tuple[str, str | None]] = {
    "record": ("lineage.hooks", "recording"),
    "open": ("lineage.traces", "open_trace"),
    "check": ("lineage.checks", "check"),
    "testing": ("lineage.testing", None),
}

__all__ = ["__version__", "check", "open", "record", "testing"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module, attribute = _LAZY[name]
        loaded = import_module(module)
        return loaded if attribute is None else getattr(loaded, attribute)
    raise AttributeError(f"module 'lineage' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
