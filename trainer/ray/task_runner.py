"""The process that runs the step, and how the one that started it follows it (verl's ``TaskRunnerV1``)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import ray

from lineage.hooks import first_line
from lineage.trainer.quiet import quiet_libraries
from lineage.trainer.ray import cluster
from lineage.trainer.ray.errors import RemoteError, unwrap_error
from lineage.trainer.ray.log_relay import LogCollector, LogLine
from lineage.trainer.ray.recording import RunTrace
from lineage.trainer.ray.trainer import RayPPOTrainer
from lineage.trainer.tracking.dump import Sample

#: for a step to notice that the run is over and for every process to close what it records: a user's function or a
#: collective that hangs never notices
STOP_SECONDS = 60.0
_PATIENCE_SECONDS = 5.0

logger = logging.getLogger("lineage")


@dataclass(frozen=True)
class Begun:
    """Everything is built: the run has so many steps, so many of them done by an earlier run."""

    total: int
    done: int


@dataclass(frozen=True)
class Logged:
    """The metrics of a step."""

    metrics: Mapping[str, float]
    step: int


@dataclass(frozen=True)
class Shown:
    """Answers of a validation."""

    samples: Sequence[Sample]
    step: int


@dataclass(frozen=True)
class Warned:
    """Something a process of the run logged, from warnings on."""

    line: LogLine


Event = Begun | Logged | Shown | Warned
Events: TypeAlias = "queue.SimpleQueue[Event | None]"


class TaskRunner:
    """Builds the other processes, trains, and tells what comes of it as it comes.

    None of its methods is a coroutine: one would make it an actor of one thread to Ray, in which :meth:`stop` waits
    for the next event of :meth:`run`.

    Args:
        config: the configuration.
        trace: how the run is recorded.
    """

    def __init__(self, config: Any, trace: RunTrace) -> None:
        quiet_libraries()
        self._log = LogCollector()
        self.config = config
        self.trace = trace
        self._events: Events = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._training: asyncio.Task[Any] | None = None
        self._stopped = False
        self._error: BaseException | None = None

    def run(self) -> Iterator[Event]:
        """Train to the end; every event as it happens, then what ended the run where that was an error."""
        thread = threading.Thread(target=self._train, name="train")
        thread.start()
        # one by one: Ray sends a word of its own back to each event, which `yield from` would hand to an iterator
        while (event := self._events.get()) is not None:
            for line in self._log.take():
                yield Warned(line)
            yield event
        thread.join()
        for line in self._log.take():
            yield Warned(line)
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End the training as Ctrl-C does: the processes close what they record."""
        self._stopped = True
        if self._loop is not None and self._training is not None:
            with contextlib.suppress(RuntimeError):  # it has just ended by itself
                self._loop.call_soon_threadsafe(self._training.cancel)

    def _train(self) -> None:
        try:
            asyncio.run(_fit(self.config, self.trace, self._events, self._begin))
        except asyncio.CancelledError:
            self._error = KeyboardInterrupt()
        except BaseException as error:
            self._error = _portable(error)
        finally:
            self._events.put(None)

    def _begin(self) -> None:
        """The training is a task from here on: what stops it is to cancel that."""
        self._loop, self._training = asyncio.get_running_loop(), asyncio.current_task()
        if self._stopped:
            raise asyncio.CancelledError


async def _fit(config: Any, trace: RunTrace, events: Events, begin: Callable[[], None]) -> None:
    begin()
    trainer = RayPPOTrainer(config, trace, tracking=_Relay(events))
    why: BaseException | None = None
    try:
        await trainer.init()
        manager = trainer.init_agent_loop_manager()
        events.put(Begun(trainer.total_training_steps, trainer.global_steps))
        await trainer.fit(manager)
    except asyncio.CancelledError:
        why = KeyboardInterrupt()
        raise
    except BaseException as error:
        why = error
        raise
    finally:
        trainer.close(why)


class _Relay:
    """Takes the trainer's metrics to whoever follows the run."""

    def __init__(self, events: Events) -> None:
        self._events = events

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._events.put(Logged(dict(metrics), step))

    def log_generations(self, samples: Sequence[Sample], step: int) -> None:
        self._events.put(Shown(list(samples), step))


def train(config: Any, trace: RunTrace) -> Generator[Event, None, None]:
    """Run a training in a Ray cluster of its own, or the one the configuration names; yields what happens.

    When the generator is closed, or interrupted, the run is stopped in order.

    Raises:
        UserError: the mistake, or the death of a process, that ended the run.
    """
    try:
        cluster.start(config)
        runner: Any = ray.remote(TaskRunner).options(num_cpus=1, max_concurrency=2).remote(config, trace)
        following = runner.run.options(num_returns="streaming").remote()
        try:
            for reference in following:
                event: Event = ray.get(reference)
                yield event
        except ray.exceptions.RayError as error:
            raise unwrap_error(error, "driver", "fit") from None
        except (KeyboardInterrupt, GeneratorExit):
            _stop(runner, following)
            raise
    finally:
        cluster.stop()


def _stop(runner: Any, following: ray.ObjectRefGenerator) -> None:
    """Ask the runner to end, and wait until it has, or hangs; a second Ctrl-C waits no longer.

    What has happened meanwhile is not followed: of the events only their end is waited for.
    """
    runner.stop.remote()
    ended = [following.completed()]
    if not ray.wait(ended, timeout=_PATIENCE_SECONDS)[0]:
        logger.warning("the step does not end: waiting %d s for it (Ctrl-C: no longer)", STOP_SECONDS)
        if not ray.wait(ended, timeout=STOP_SECONDS)[0]:
            logger.warning("the step did not end: the run is ended without it")


def _portable(error: BaseException) -> BaseException:
    """The error, if it can be sent to another process."""
    try:
        ray.cloudpickle.loads(ray.cloudpickle.dumps(error))
    except Exception:
        return RemoteError(f"{type(error).__name__}: {first_line(error)}")
    return error
