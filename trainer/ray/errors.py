"""What goes wrong between processes, as one error of ours: a process that died, or the error another one raised."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import (
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    RuntimeEnvSetupError,
    TaskCancelledError,
)

from lineage.hooks import LineageError, UserError, first_line

# The others of a group notice a death as a broken connection, and may say so before Ray says who died: seconds to wait
# for that, by whether what was raised first looks like such a connection.
_GRACE_SECONDS, _GRACE_SECONDS_OF_A_BROKEN_CONNECTION = 5.0, 30.0
# Ray's own guard of the machine's memory ends a process, and says so by an error of its own.
_DIED = (RayActorError, OutOfMemoryError)


class ClusterError(UserError):
    """Ray cannot be started, reached, or has not the resources the run asks for."""


class ProcessDiedError(UserError):
    """A process of the run ended in the middle of its work."""


class RemoteError(LineageError):
    """A process raised what cannot travel to this one."""


def gather_results(calls: Mapping[str, Any], doing: str) -> list[Any]:
    """What every process of a call returned, in the order of ``calls``.

    Args:
        calls: reference of each process's answer, by the name of the process.
        doing: what they do, for the message.

    Raises:
        ProcessDiedError: one of them died, which then comes before whatever the others say of it.
        Exception: what one of them raised, as it raised it.
    """
    names = {reference: process for process, reference in calls.items()}
    waiting, results = list(names), dict[Any, Any]()
    while waiting:
        (done,), waiting = ray.wait(waiting, num_returns=1)
        try:
            results[done] = ray.get(done)
        except Exception as error:
            cause = unwrap_error(error, names[done], doing)
            raise _dead(calls, doing, cause) or cause from None
    return [results[reference] for reference in names]


async def await_result(reference: Any, process: str, doing: str) -> Any:
    """What one process returned, without holding up the event loop; a cancelled wait cancels the call.

    Raises:
        ProcessDiedError, Exception: as :func:`gather_results`.
    """
    try:
        return await reference
    except asyncio.CancelledError:
        ray.cancel(reference)
        raise
    except RayError as error:
        raise unwrap_error(error, process, doing) from None


def unwrap_error(error: BaseException, process: str, doing: str) -> BaseException:
    """What an error of Ray means: the error that was raised over there, or that the process has died."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return cause if isinstance(cause, Exception) else RemoteError(f"{process}: {first_line(error)}")
    if isinstance(error, TaskCancelledError):
        return asyncio.CancelledError()
    if isinstance(error, _DIED):
        return ProcessDiedError(
            f"process {process} died in {doing}, and the run with it (out of memory? the system's log says). What was "
            "recorded is kept; where checkpoints are saved, go on with trainer.resume_mode"
        )
    if isinstance(error, RuntimeEnvSetupError):
        return ClusterError(f"ray_kwargs.ray_init.runtime_env: {process} cannot start by it: {first_line(error)}")
    if isinstance(error, RayError):
        return RemoteError(f"{process} in {doing}: {first_line(error)}")
    return error


def _dead(calls: Mapping[str, Any], doing: str, first: BaseException) -> BaseException | None:
    """That a process of a call has died, which the others know as a broken connection; None where none has."""
    broken = isinstance(first, RuntimeError) and not isinstance(first, LineageError)  # torch's own of a group
    grace = _GRACE_SECONDS_OF_A_BROKEN_CONNECTION if broken else _GRACE_SECONDS
    ray.wait(list(calls.values()), num_returns=len(calls), timeout=grace)
    for process, reference in calls.items():
        try:
            ray.get(reference, timeout=0)
        except _DIED as died:
            return unwrap_error(died, process, doing)
        except Exception:
            continue
    return None
