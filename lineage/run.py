"""A run: its folder under ``runs/``, and what the trace's metadata says of it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from lineage.errors import UserError
from lineage.schema import META_CONFIG, META_RUN, META_STATE, META_VERSION, SCHEMA_VERSION

INFO_FILE = "run.json"
TRACE_FILE = "trace.parquet"
SEGMENT_FILE = "trace-{:05d}.parquet"  # of a trace too large for one file
LATEST = "latest"

_VERSIONS_OF = ("rl-lineage", "torch", "tensordict", "transformers", "ray", "vllm", "verl", "trl", "TransferQueue")


@dataclass(frozen=True)
class RunInfo:
    """What a trace says of its run.

    Attributes:
        run_id: name of the run.
        profile: whose formulas the checks use: ``lineage``, ``verl`` or ``trl``.
        config: the resolved configuration.
        facts: seed, model and tokenizer hash and whatever else the program says of itself.
    """

    run_id: str
    profile: str = "lineage"
    config: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Keep the metadata beside the parts until they are compacted."""
        run = {
            "run_id": self.run_id,
            "profile": self.profile,
            "config_hash": config_hash(self.config),
            "git_revision": git_revision(),
            "python": platform.python_version(),
            "versions": installed_versions(),
            **self.facts,
        }
        temporary = folder / f".{INFO_FILE}-{secrets.token_hex(4)}"  # a reader finds the old text or the new one
        temporary.write_text(json.dumps({"run": run, "config": self.config}, default=str))
        os.replace(temporary, folder / INFO_FILE)


def file_metadata(folder: Path, state: Mapping[str, Any]) -> dict[bytes, bytes]:
    """Parquet key-value metadata of the run whose parts lie in ``folder``."""
    try:
        info = json.loads((folder / INFO_FILE).read_text())
    except (OSError, ValueError):  # the trace is still worth having
        info = {"run": {}, "config": {}}
    return {
        META_VERSION: str(SCHEMA_VERSION).encode(),
        META_RUN: json.dumps(info["run"]).encode(),
        META_CONFIG: json.dumps(info["config"]).encode(),
        META_STATE: json.dumps(state).encode(),
    }


def config_hash(config: Mapping[str, Any]) -> str:
    """sha256 of the configuration's canonical JSON."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()


def installed_versions() -> dict[str, str]:
    """Versions of the packages a reader of the trace asks for; the absent ones are left out."""
    versions = {}
    for name in _VERSIONS_OF:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def git_revision() -> str | None:
    """Revision of the working tree the program was started in, or None."""
    try:
        command = ["git", "rev-parse", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def new_run_folder(root: Path) -> Path:
    """Make ``root/<date-time-xxxx>/``, never an existing one.

    Raises:
        UserError: the folder cannot be made.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        while True:
            folder = root / f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
            try:
                folder.mkdir()
                break
            except FileExistsError:
                continue
    except OSError as error:
        raise UserError(
            f"cannot make a run folder under {root}: {error.strerror or error}; start from a folder you can write"
        ) from error
    return folder


def point_latest(folder: Path) -> None:
    """Make ``latest`` beside a run folder mean that run, in one step: a reader never finds the link missing."""
    temporary = folder.parent / f".{LATEST}-{secrets.token_hex(4)}"
    os.symlink(folder.name, temporary)
    os.replace(temporary, folder.parent / LATEST)
