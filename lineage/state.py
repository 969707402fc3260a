"""What each process says of its own trace, on disk while it runs, and what all of them together say of the run."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import time
import weakref
import zlib
from pathlib import Path
from typing import Any

from lineage import locks
from lineage.errors import RecorderError
from lineage.steps import Steps

STATE_SUFFIX = ".state.json"

_STATE_BYTES = 4096
_START_SECONDS = 0.5  # a reader that asks whether a run goes on holds its lock for an instant
_READ_AGAIN_SECONDS = 0.5

_open_files: weakref.WeakSet[StateFile] = weakref.WeakSet()


class StateFile:
    """What the process says of its own trace: steps sealed, the step it is in, what it dropped.

    The file has a fixed size from the start and is overwritten in place, so that it can still be written when the disk
    is full; a sum at its end tells a reader that it read one state and not two halves. It is locked for as long as the
    process lives.

    Args:
        folder: the parts folder.
        process: name of this process.
        run_id: the run it records.

    Raises:
        RecorderError: a live process of this name, or of another run, records into the folder.
    """

    def __init__(self, folder: Path, process: str, run_id: str = "") -> None:
        _refuse_another_run(folder, run_id)
        path = folder / f"{process.replace(':', '-')}{STATE_SUFFIX}"
        self._file = io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+")
        locked = locks.lock(self._file.fileno(), _START_SECONDS)
        before = _read_or_none(path) if path.stat().st_size else None
        if locked is False or (locked is None and before is not None and is_written(path, before)):
            self._file.close()
            raise RecorderError(_refusal(folder, process, before))
        self.state: dict[str, Any] = {
            "process": process,
            "run_id": run_id,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "locked": locked is True,
            "closed": False,
            "step": None,
            "open_step": None,
            "steps": Steps(),
            "removed": Steps(),
            "torn": [],
            "dropped": {"rows": 0, "steps": Steps(), "why": []},
        }
        if before is not None:
            self._carry_over(before)
        elif path.stat().st_size:
            self.state["dropped"]["why"].append(f"the state of an earlier {process} is not readable")
        _open_files.add(self)
        self.write()

    def begin(self, step: int, traced: bool) -> None:
        """Say which step the process is in, and whether it is traced."""
        self.state["step"] = step
        self.state["open_step"] = step if traced else None
        self.write()

    def sealed(self, step: int) -> None:
        """Say that a step is on disk."""
        self.state["steps"].append(step)
        if step in self.state["removed"]:  # the run went back to it
            self.state["removed"] = self.state["removed"].without(Steps.of([step]))

    def removed(self, steps: list[int]) -> None:
        """Say that the parts of these steps are about to go, and with them every torn step before."""
        if not steps:
            return
        torn = [step for step in self.state["torn"] if step <= max(steps)]
        gone = Steps.of(sorted({*steps, *torn}))
        self.state["torn"] = [step for step in self.state["torn"] if step not in gone]
        self.state["steps"] = self.state["steps"].without(gone)
        for step in gone:
            if step not in self.state["removed"]:
                self.state["removed"].append(step)

    def write(self) -> None:
        """Write the state over the old one."""
        text = json.dumps(self.state, default=lambda steps: steps.ranges).encode()
        text += b"\n%08x\n" % zlib.crc32(text)
        with contextlib.suppress(OSError, ValueError):  # a disk that refuses even this: the run then counts as torn
            os.pwrite(self._file.fileno(), text.ljust(_STATE_BYTES), 0)
            os.ftruncate(self._file.fileno(), max(len(text), _STATE_BYTES))

    def close(self) -> None:
        """Write once more, close the file and let its lock go."""
        self.write()
        self._file.close()

    def _carry_over(self, before: dict[str, Any]) -> None:
        """An earlier process of the same name, e.g. a worker that was restarted: the step it was in is torn."""
        for name in ("steps", "removed", "dropped"):
            self.state[name] = before[name]
        self.state["torn"] = before["torn"] + [step for step in [before["open_step"]] if step is not None]

    def _forget(self) -> None:
        self._file.close()


def _forget_in_child() -> None:
    """A forked child shares the lock and would hold it after its parent's death: it closes its copy."""
    for state in list(_open_files):
        state._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


def read_state(path: Path) -> dict[str, Any]:
    """State of one process, also while it is written.

    Raises:
        ValueError: the file is not a state.
        FileNotFoundError: it is not there.
    """
    until = time.monotonic() + _READ_AGAIN_SECONDS
    while True:
        try:
            return _parsed(path.read_text())
        except (ValueError, KeyError, TypeError) as error:
            if time.monotonic() >= until:
                raise ValueError(f"{path}: not a state") from error
            time.sleep(0.005)


def _parsed(text: str) -> dict[str, Any]:
    text, _, rest = text.partition("\n")
    if rest.strip() and int(rest[:8], 16) != zlib.crc32(text.encode()):
        raise ValueError("two halves of a state")
    state: dict[str, Any] = json.loads(text)
    state["steps"], state["removed"] = Steps(state["steps"]), Steps(state.get("removed", ()))
    state["dropped"]["steps"] = Steps(state["dropped"]["steps"])
    return state


def is_written(path: Path, state: dict[str, Any]) -> bool:
    """True while the process that wrote this state still records.

    On another host, where the file system has no locks, a process that did not close is taken to be alive.
    """
    if state["closed"] or "error" in state:
        return False
    locked = locks.is_locked(path) if state.get("locked") else None
    if locked is not None:
        return locked
    return state.get("host", socket.gethostname()) != socket.gethostname() or locks.alive(state["pid"])


def states(parts: Path) -> list[tuple[Path, dict[str, Any] | None]]:
    """The state files of a parts folder with what they say, None where one cannot be read."""
    found = []
    for path in sorted(parts.glob(f"*{STATE_SUFFIX}")):
        with contextlib.suppress(FileNotFoundError):  # its run has just been compacted
            found.append((path, _read_or_none(path)))
    return found


def run_state(parts: Path) -> dict[str, Any]:
    """State of all processes of a run as one.

    A step is torn when any process began it and did not seal it. ``reached`` is the last step that every process which
    did not close has behind it (None where all closed): what others recorded of later steps is not whole.
    """
    merged: dict[str, Any] = {
        "closed": True,
        "steps": [],
        "torn": [],
        "dropped": {"rows": 0, "steps": [], "why": []},
        "processes": [],
        "removed": Steps(),
        "reached": None,
        "live": [],
    }
    torn: set[int] = set()
    removed: set[int] = set()
    for path, state in states(parts):
        if state is None:
            merged["closed"] = False
            merged["dropped"]["why"].append(f"{path.name} is not readable")
            continue
        merged["processes"].append(state["process"])
        merged["closed"] &= state["closed"]
        merged["steps"] += state["steps"]
        removed.update(state["removed"])
        torn.update(state["torn"])
        if is_written(path, state):
            merged["live"].append({name: state.get(name) for name in ("process", "pid", "step")})
        elif state["open_step"] is not None:
            torn.add(state["open_step"])
        merged["dropped"]["rows"] += state["dropped"]["rows"]
        merged["dropped"]["steps"] += state["dropped"]["steps"]
        merged["dropped"]["why"] += state["dropped"]["why"]
        if "error" in state:
            merged["error"] = state["error"]
        elif not state["closed"] and (behind := _behind(state, path)) is not None:
            merged["reached"] = behind if merged["reached"] is None else min(behind, merged["reached"])
    merged["closed"] &= bool(merged["processes"])
    merged["torn"] = sorted(torn)
    merged["steps"] = sorted(set(merged["steps"]) - torn - removed)
    merged["removed"] = Steps.of(sorted(removed))
    merged["dropped"]["steps"] = sorted(set(merged["dropped"]["steps"]) - removed)
    return merged


def _behind(state: dict[str, Any], path: Path) -> int | None:
    """The last step a process that did not close has behind it; None where it does not say."""
    if state.get("step") is None:
        return 0 if "step" in state and is_written(path, state) else None
    return int(state["step"]) - (state["open_step"] is not None)


def _read_or_none(path: Path) -> dict[str, Any] | None:
    try:
        return read_state(path)
    except ValueError:
        return None


def _refuse_another_run(folder: Path, run_id: str) -> None:
    for path, state in states(folder):
        other = state and state.get("run_id")
        if state and other and run_id and other != run_id and is_written(path, state):
            raise RecorderError(
                f"{folder.parent} is being recorded by run {other} (process {state['process']}, pid {state['pid']}): "
                f"give run {run_id} a folder of its own, or end that run first"
            )


def _refusal(folder: Path, process: str, state: dict[str, Any] | None) -> str:
    pid = "another process" if state is None else f"pid {state['pid']}"
    if state is not None and state["pid"] == os.getpid():
        pid = f"this process, pid {state['pid']}, with another recorder"
    return (
        f"{folder.parent} is being recorded as {process!r} by {pid}: end it, "
        "or record into another folder or under another process name"
    )
