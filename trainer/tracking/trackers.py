"""Services that keep metrics: TensorBoard, Weights & Biases, MLflow, Trackio. Each is imported when it is asked for.

None of them uses the network unless its own environment variables say so: their files lie in the run folder.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Protocol

from lineage.hooks import MissingExtraError

EXTRA = "loggers"
# trainer.logger -> the module it needs
MODULES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}

_MLFLOW_BATCH = 100  # parameters of one call
_MLFLOW_TEXT = 500  # characters of a parameter every version takes


@dataclass(frozen=True)
class Experiment:
    """What a service files the run under.

    Attributes:
        folder: run folder; its name is the name of the run where the service needs one of its own.
        project, name: ``trainer.project_name``, ``trainer.experiment_name``.
        config: the resolved configuration.
    """

    folder: Path
    project: str = "lineage"
    name: str = "grpo"
    config: Mapping[str, Any] = field(default_factory=dict)


class MetricLogger(Protocol):
    """One place metrics go to."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take one step's metrics."""

    def close(self, failed: bool = False) -> None:
        """Finish; ``failed`` when an error ended the run."""


def need_modules(names: Sequence[str]) -> None:
    """Fail before anything is made when a service's package is not installed.

    Raises:
        MissingExtraError: names the package and the pip line.
    """
    for name in names:
        if name in MODULES and not _installed(MODULES[name]):
            raise MissingExtraError(f"trainer.logger={name}", EXTRA, MODULES[name])


def _installed(module: str) -> bool:
    """True for a package; a folder of that name beside the program, which such services leave behind, is none."""
    found = PathFinder.find_spec(module)
    return found is not None and found.origin is not None


class TensorBoardLogger:
    """Event files in ``TENSORBOARD_DIR``, or in ``tensorboard`` of the run folder."""

    def __init__(self, experiment: Experiment) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = os.environ.get("TENSORBOARD_DIR") or experiment.folder / "tensorboard"
        self._writer = SummaryWriter(str(folder))
        self._writer.add_text("config", f"```\n{json.dumps(experiment.config, indent=1, default=str)}\n```")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add a scalar a metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, failed: bool = False) -> None:
        """End the file."""
        self._writer.close()


class WandbLogger:
    """A run of Weights & Biases: offline, in ``wandb`` of the run folder, unless ``WANDB_MODE`` or a key is set."""

    def __init__(self, experiment: Experiment) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its own crash reports would be network
        import wandb

        key = os.environ.get("WANDB_API_KEY")
        settings = wandb.Settings(
            mode=os.environ.get("WANDB_MODE") or ("online" if key else "offline"),
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,
            x_disable_meta=True,
        )
        self._run = wandb.init(
            project=experiment.project,
            name=experiment.name,
            entity=os.environ.get("WANDB_ENTITY"),
            config=dict(experiment.config),
            dir=str(experiment.folder),
            settings=settings,
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the step's metrics."""
        self._run.log(dict(metrics), step=step)

    def close(self, failed: bool = False) -> None:
        """Finish the run, as failed or as done."""
        self._run.finish(exit_code=int(failed))


class MlflowLogger:
    """A run of MLflow at ``MLFLOW_TRACKING_URI``, or in the file store ``mlruns`` of the run folder.

    Its experiment is verl's project, its run verl's experiment. A metric's name may not have an ``@``: ``mean@4`` is
    ``mean_at_4``.
    """

    def __init__(self, experiment: Experiment) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # it would have a database, which needs more packages
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        place = (experiment.folder / "mlruns").resolve().as_uri()
        self._client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or place)
        known = self._client.get_experiment_by_name(experiment.project)
        project = known.experiment_id if known else self._client.create_experiment(experiment.project)
        self._run_id = self._client.create_run(project, run_name=experiment.name).info.run_id
        params = [Param(name, text[:_MLFLOW_TEXT]) for name, text in _flat(experiment.config)]
        for start in range(0, len(params), _MLFLOW_BATCH):
            self._client.log_batch(self._run_id, params=params[start : start + _MLFLOW_BATCH])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the step's metrics; one that is not a number cannot be kept."""
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        values = [
            Metric(name.replace("@", "_at_"), float(value), now, step)
            for name, value in metrics.items()
            if math.isfinite(value)
        ]
        self._client.log_batch(self._run_id, metrics=values)

    def close(self, failed: bool = False) -> None:
        """End the run, as failed or as finished."""
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")


class TrackioLogger:
    """A run of Trackio, in ``TRACKIO_DIR`` or in ``trackio`` of the run folder."""

    def __init__(self, experiment: Experiment) -> None:
        os.environ.setdefault("TRACKIO_DIR", str((experiment.folder / "trackio").resolve()))  # read at the import
        with contextlib.redirect_stdout(io.StringIO()):  # it prints how to look at it
            import trackio

            self._trackio = trackio
            self._run = trackio.init(
                project=experiment.project,
                name=experiment.name,
                config=dict(_flat(experiment.config)),
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the step's metrics."""
        self._run.log({name: float(value) for name, value in metrics.items()}, step=step)

    def close(self, failed: bool = False) -> None:
        """Write what is left."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._trackio.finish()  # which also forgets it: a run of its own is finished again at exit


SERVICES: dict[str, Callable[[Experiment], MetricLogger]] = {
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
    "trackio": TrackioLogger,
}


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and their values as text."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)
