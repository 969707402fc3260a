"""What a command needs beyond the base: one line that says so, in place of a traceback."""

from __future__ import annotations

import importlib.util

from lineage.errors import MissingExtraError

_MODULES = {
    "train": ("torch", "tensordict", "transformers", "hydra", "torchdata"),
    "ray": ("ray", "transfer_queue"),
    "vllm": ("vllm",),
}


def need_extra(extra: str, what: str) -> None:
    """Fail in one line when a package of an extra is missing.

    Args:
        extra: ``train``, ``ray`` or ``vllm``.
        what: what needs it: a command, a setting.

    Raises:
        MissingExtraError: names the need, the package and the pip line.
    """
    for module in _MODULES[extra]:
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(what, extra, module)
