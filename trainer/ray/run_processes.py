"""The processes of a run: started by kind, told where the run is, and closed with it."""

from __future__ import annotations

import contextlib
from typing import Any

import ray
from ray.exceptions import RayError

from lineage import hooks
from lineage.trainer.ray.errors import gather_results
from lineage.trainer.ray.log_relay import log_lines_of
from lineage.trainer.ray.recording import RunProcess, RunTrace

#: for writing the last rows; less than the run as a whole may take to stop (``task_runner``), so that a process which
#: hangs in a user's function still leaves the driver time to seal the trace
CLOSE_SECONDS = 20.0


class RunProcesses:
    """The processes of a run beside the one that drives it, by their names in the trace.

    Args:
        trace: how each process records.
    """

    def __init__(self, trace: RunTrace) -> None:
        self.trace = trace
        self._handles: dict[str, Any] = {}

    def start(
        self, kind: str, process: type[RunProcess], count: int, *arguments: Any, options: dict[str, Any] | None = None
    ) -> list[Any]:
        """Start ``<kind>:0`` and so on, and wait until all are there.

        What is wrong with one is said before the next kind starts.

        Args:
            process: made with the trace, the process's number and ``arguments``.
            options: Ray's, of each; None asks for a logical CPU.

        Returns:
            Their handles, in order.
        """
        actor = ray.remote(process).options(**(options or {"num_cpus": 1}))
        handles = {f"{kind}:{number}": actor.remote(self.trace, number, *arguments) for number in range(count)}
        self._handles.update(handles)
        gather_results({name: handle.pid.remote() for name, handle in handles.items()}, "init")
        return list(handles.values())

    def of(self, kind: str) -> list[Any]:
        """Handles of the processes of a kind, in order."""
        return [handle for name, handle in self._handles.items() if name.startswith(f"{kind}:")]

    def begin(self, global_steps: int) -> None:
        """Tell every process that a step begins."""
        self._ask("step", global_steps)

    def seal(self) -> None:
        """Have every process seal the step, and log here what they logged there."""
        for name, lines in zip(self._handles, self._ask("seal"), strict=True):
            log_lines_of(name, lines)

    def close(self, why: BaseException | None) -> None:
        """End what every process records; one that is dead, or hangs, has left what it had.

        Args:
            why: what ended the run; None where it ended in order.
        """
        handles, self._handles = self._handles, {}
        calls = {handle.close.remote(hooks.reason_of(why)): name for name, handle in handles.items()}
        ended, _ = ray.wait(list(calls), num_returns=len(calls), timeout=CLOSE_SECONDS)
        for call in ended:
            with contextlib.suppress(RayError):
                log_lines_of(calls[call], ray.get(call))

    def _ask(self, method: str, *arguments: Any) -> list[Any]:
        return gather_results(
            {name: getattr(handle, method).remote(*arguments) for name, handle in self._handles.items()}, method
        )
