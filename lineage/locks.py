"""Who is at work in a folder: locks that the kernel lets go when their process ends, however it ends.

A process number says less: it is used again, and means nothing on another host. Where there are no locks (some network
file systems, Pythons without ``fcntl``), nothing is locked, and whoever asks has to go by the process number. Recording
is for POSIX systems only: folders are opened here, and states are overwritten in place by ``os.pwrite``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

_PAUSE_SECONDS = 0.02


def lock(descriptor: int, wait: float | None) -> bool | None:
    """Lock an open file or folder for this process.

    Args:
        descriptor: of the file; the lock lasts until it is closed.
        wait: seconds to try; None waits as long as it takes.

    Returns:
        True when it is locked, False when another has it, None where the file system has no locks.
    """
    if fcntl is None:
        return None
    until = None if wait is None else time.monotonic() + wait
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if until is not None and time.monotonic() >= until:
                return False
            time.sleep(_PAUSE_SECONDS)
        except OSError:
            return None


def is_locked(path: Path) -> bool | None:
    """Whether some open file has the lock on ``path``; None where that cannot be known."""
    if fcntl is None:
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False


@contextmanager
def hold(folder: Path, wait: float | None = None) -> Iterator[bool]:
    """Hold a folder while a recorder starts in it or its parts are compacted: one at a time. Makes it if need be.

    Gives False when another had it for all of ``wait`` seconds.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            held = lock(descriptor, wait)
            here = None
            with suppress(FileNotFoundError):
                here = os.stat(folder).st_ino
            if here != os.fstat(descriptor).st_ino:
                continue  # it was removed while we waited
            yield held is not False
            return
        finally:
            os.close(descriptor)


def alive(pid: int) -> bool:
    """Whether this host has a process of that number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
