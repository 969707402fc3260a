"""A fault in every process of a run: Ray calls :func:`inject` in each before anything else."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

from lineage.trainer.faults.registry import find_fault

VARIABLE = "LINEAGE_FAULT"
_injected = ExitStack()


def runtime_env(name: str) -> dict[str, Any]:
    """What ``ray.init`` is to be told, so that every process has the fault of this name."""
    return {"env_vars": {VARIABLE: name}, "worker_process_setup_hook": f"{__name__}.{inject.__name__}"}


def inject() -> None:
    """Inject the fault the environment names, until the process ends."""
    _injected.enter_context(find_fault(os.environ[VARIABLE]).inject())
