"""A Python that has megatron-core, in an environment of its own: it comes without its dependencies, beside torch.

``python tests/megatron/megatron_environment.py`` makes it and prints the interpreter.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

VARIABLE = "LINEAGE_MEGATRON_PYTHON"
VERSION = "0.16.1"
INSTALLS = (
    ["torch>=2.11,<2.14", "numpy", "packaging", "einops"],
    ["--no-deps", f"megatron-core=={VERSION}"],
)


class NoEnvironmentError(Exception):
    """The environment cannot be made here; says why."""


def megatron_python() -> Path:
    """The interpreter: that of ``LINEAGE_MEGATRON_PYTHON``, else of an environment kept in the user's cache.

    Raises:
        NoEnvironmentError: it is not there yet and cannot be made.
    """
    named = os.environ.get(VARIABLE)
    if named:
        if not Path(named).is_file():
            raise FileNotFoundError(f"{VARIABLE}={named} is no file: name a Python with megatron-core, or leave it out")
        return Path(named)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "lineage" / f"megatron-core-{VERSION}-python{sys.version_info.major}.{sys.version_info.minor}"
    python, whole = folder / "bin" / "python", folder / "whole"
    if not whole.exists():
        shutil.rmtree(folder, ignore_errors=True)  # what an interrupted install left
        _run([sys.executable, "-m", "venv", str(folder)])
        for packages in INSTALLS:
            _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages])
        whole.touch()
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing was said"]
        raise NoEnvironmentError(f"{' '.join(command[1:])}: {said[-1]}")


if __name__ == "__main__":
    print(megatron_python())
