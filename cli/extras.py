"""What a command needs beyond the base: one line that says so, in place of a traceback."""

from __future__ import annotations

import importlib.util

from lineage.errors import MissingExtraError

_TRAIN = ("torch", "tensordict", "transformers", "hydra", "torchdata")


def need_train_extra(command: str) -> None:
    """Fail in one line when a package of the train extra is missing.

    Raises:
        MissingExtraError: names the command, the package and the pip line.
    """
    for module in _TRAIN:
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(f"lineage {command}", "train", module)
