"""Ctrl-C while DuckDB works.

DuckDB looks for signals between two tasks of the calling thread, and one task can last for minutes. Its own interrupt
is heeded within a task, and any thread may ask for it.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import duckdb
from duckdb import DuckDBPyConnection


@contextmanager
def interruptible(con: DuckDBPyConnection) -> Iterator[None]:
    """Ctrl-C stops what the connection runs, and is a KeyboardInterrupt; DuckDB calls it an error of its own."""
    with _at_once(con), as_keyboard_interrupt():
        yield


@contextmanager
def as_keyboard_interrupt() -> Iterator[None]:
    """DuckDB's word for Ctrl-C in Python's."""
    try:
        yield
    except Exception as error:
        if interrupted(error):
            raise KeyboardInterrupt from error
        raise


def interrupted(error: BaseException) -> bool:
    """True when this is DuckDB's word for Ctrl-C."""
    return isinstance(error, duckdb.InterruptException) or str(error) == "Query interrupted"


@contextmanager
def _at_once(con: DuckDBPyConnection) -> Iterator[None]:
    """A thread that hears of a signal when it comes, not when the main thread is back in Python."""
    if threading.current_thread() is not threading.main_thread():  # signals are not its own
        yield
        return
    ear, mouth = socket.socketpair()
    mouth.setblocking(False)
    before = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)

    def listen() -> None:
        while heard := ear.recv(64):
            if signal.SIGINT in heard:
                con.interrupt()
            if before >= 0:  # an event loop listens too
                os.write(before, heard)

    listener = threading.Thread(target=listen, name="lineage-interrupts", daemon=True)
    listener.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        mouth.close()
        listener.join()
        ear.close()
