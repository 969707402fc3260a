"""The recorder of each process of a run: every process writes its own parts, the last one to close seals the run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lineage import hooks
from lineage.hooks import AnyRecorder
from lineage.trainer.quiet import quiet_libraries
from lineage.trainer.ray.log_relay import LogCollector, LogLine
from lineage.trainer.rng import seed_all


@dataclass(frozen=True)
class RunTrace:
    """What every process needs to record its share of a run.

    Attributes:
        folder: run folder.
        enabled: whether the run is traced.
        config: the resolved configuration, as plain values.
        facts: what the trace says of the run (seed, model and tokenizer hash).
    """

    folder: Path
    enabled: bool
    config: Mapping[str, Any]
    facts: Mapping[str, Any]

    def open(self, process: str, rank: int | None = None, coord: Mapping[str, int] | None = None) -> AnyRecorder:
        """Open the recorder of this process and make it the active one."""
        trace = self.config["trace"]
        return hooks.open_recorder(
            self.folder,
            enabled=self.enabled,
            config=self.config,
            run=self.facts,
            process=process,
            rank=rank,
            coord=coord,
            every=trace["every"],
            keep_steps=trace["keep_steps"],
            reuse=trace["reuse"],
            sidecar=trace["sidecar"],
        )


class RunProcess:
    """What every process of a run is told: in which step it is, when that has ended, and when the run has.

    Args:
        trace: how it records.
        name: its name in the trace.
        rank, coord: its place, for one of several that train.
    """

    def __init__(
        self, trace: RunTrace, name: str, *, rank: int | None = None, coord: Mapping[str, int] | None = None
    ) -> None:
        quiet_libraries()
        self._log = LogCollector()
        seed_all(trace.config["trainer"]["seed"])  # a scorer or a tool of the user's may draw
        self._known: set[str] = set()
        self.recorder = trace.open(name, rank, coord)
        self.recorder.step(0)

    def pid(self) -> int:
        """Number of the process on its host; answering it, the process is ready."""
        return os.getpid()

    def step(self, global_steps: int) -> None:
        """A step begins."""
        self.recorder.step(global_steps)

    def know(self, keys: Sequence[str], tags: Sequence[Mapping[str, Any]], slots: Sequence[int] | None = None) -> None:
        """Take what other processes have put on keys, until the step has ended."""
        note_tags(keys, tags, slots)
        self._known.update(keys)

    def seal(self) -> list[LogLine]:
        """The step has ended: its rows go to disk. Returns what the process has had to say."""
        if not isinstance(self.recorder, hooks.NullRecorder):
            self.recorder.forget(sorted(self._known))
        self._known.clear()
        self.recorder.seal()
        return self._log.take()

    def close(self, error: str | None = None) -> list[LogLine]:
        """The run has ended, for a reason where it did not end in order."""
        self.recorder.close(error)
        hooks.install(hooks.NullRecorder())
        return self._log.take()


def note_tags(keys: Sequence[str], tags: Sequence[Mapping[str, Any]], slots: Sequence[int] | None = None) -> None:
    """Tell the recorder of this process what another one has put on keys, and where: rows about them carry it."""
    recorder = hooks.recorder()
    if isinstance(recorder, hooks.NullRecorder) or not recorder.tracing:
        return
    recorder.elements.note(keys, tags)
    if slots is not None:
        recorder.elements.note_slots(keys, slots)
