"""Model, optimiser and schedule in a folder of ``torch.distributed.checkpoint``: each rank writes what it holds.

A folder that so many ranks have written is read by any other number of them, and by one process that holds all. What
is in it are tensors by name and nothing else, so that reading it runs no code: ``model.<name>``,
``optimizer.<parameter>.<state>``, ``schedule.<counter>`` and, of every rank that is a process, ``rng.<rank>``, on a GPU
``rng.<rank>.cuda`` too.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from lineage.hooks import first_line
from lineage.trainer.checkpoint import CheckpointError

if TYPE_CHECKING:
    from lineage.trainer.training import TrainingWorker

METADATA = ".metadata"
#: of a schedule; all else of it follows from the configuration
COUNTERS = ("last_epoch", "_step_count")
_CUDA = ".cuda"
_DCP = "torch.distributed.checkpoint."
_PLAIN = {
    (f"{_DCP}metadata", name)
    for name in (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties"),
        *("ChunkStorageMetadata", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING"),
    )
} | {
    (f"{_DCP}filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


def save_state(folder: Path, worker: TrainingWorker) -> None:
    """Write what a worker has learnt; every rank must ask.

    Args:
        folder: exists, for this alone, and is the same on every rank.

    Raises:
        OSError, RuntimeError: the disk took no more, on one of the ranks; all of them raise.
    """
    state = {f"model.{name}": tensor.detach() for name, tensor in worker.module.state_dict().items()}
    names = _names(worker)
    for parameter, values in worker.optimizer.state.items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                state[f"optimizer.{names[id(parameter)]}.{key}"] = value
    counters = worker.scheduler.state_dict()
    state |= {f"schedule.{name}": torch.tensor(counters[name]) for name in COUNTERS if name in counters}
    state |= _rng_states(worker)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.save(state, storage_writer=FileSystemWriter(folder), **_together(worker))
        except CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            if isinstance(cause, OSError):
                raise OSError(cause.errno, cause.strerror or first_line(cause)) from error
            raise RuntimeError(first_line(cause)) from error


def load_state(folder: Path, worker: TrainingWorker) -> int:
    """Go on from what :func:`save_state` wrote, whatever number of ranks wrote it; every rank must ask.

    All of it is read before anything is changed. Rates, decay and the peak of the schedule stay this run's own.

    Returns:
        Steps the optimiser had taken with the tensor that is watched (``step_watch``): none with one that has never
        had a gradient.

    Raises:
        CheckpointError: it is damaged, or of another model; every rank raises.
    """
    reader = _Reader(folder)
    target, said = dict[str, Tensor](), None
    try:
        target = _target(reader, worker)
    except CheckpointError as error:
        said = str(error)
    for problem in worker.ranks.gathered_from_all(said):
        if problem is not None:
            raise CheckpointError(problem)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load(target, storage_reader=reader, **_together(worker))
        except CheckpointException as error:
            name = reader.reading or next(iter(sorted(reader.files)), METADATA)
            raise CheckpointError(f"{folder / name} is damaged, or not a checkpoint of this trainer") from error
    return _put(target, worker)


def _together(worker: TrainingWorker) -> dict[str, Any]:
    group = worker.ranks.world
    return {"no_dist": True} if group is None else {"process_group": group}


def _rng_states(worker: TrainingWorker) -> dict[str, Tensor]:
    """This rank's generators of torch, by name, as tensors of the host.

    Where one process plays all ranks its generators are the driver's, which keeps them itself (``checkpoint``).
    """
    if worker.ranks.group is None:
        return {}
    name = f"rng.{worker.ranks.world_rank}"
    states = {name: torch.get_rng_state()}
    if worker.device.type == "cuda":
        states[name + _CUDA] = torch.cuda.get_rng_state(worker.device)
    return states


def _names(worker: TrainingWorker) -> dict[int, str]:
    return {id(parameter): name for name, parameter in worker.module.named_parameters()}


# ------------------------------------------------------------------------------------------------------------- read


class _Reader(FileSystemReader):
    """Reads metadata without running what may be in it, and remembers which file it is at."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        self.reading: str | None = None
        self.files: set[str] = set()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = self.folder / METADATA
        try:
            with path.open("rb") as file:
                metadata: Metadata = _Unpickler(file).load()
            self.files = {item.relative_path for item in metadata.storage_data.values()}
        except FileNotFoundError as error:
            raise CheckpointError(f"checkpoint {self.folder} is not whole: {METADATA} is missing") from error
        except Exception as error:  # whatever bytes that are no pickle of ours may raise
            raise CheckpointError(f"{path} is damaged, or not a checkpoint of this trainer") from error
        for name in sorted(self.files):
            if not (self.folder / name).is_file():
                raise CheckpointError(f"checkpoint {self.folder} is not whole: {name} is missing")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        self.reading = sinfo.relative_path
        return super()._slice_file(file, sinfo)


class _Unpickler(pickle.Unpickler):
    """Knows the classes metadata is made of, and no other."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint's metadata")


def _target(reader: _Reader, worker: TrainingWorker) -> dict[str, Tensor]:
    """Tensors to read into, for all that is saved and this rank has a place for: new ones, shaped as the model's."""
    saved = reader.read_metadata().state_dict_metadata
    for name, kind in saved.items():
        if not isinstance(kind, TensorStorageMetadata):
            raise CheckpointError(f"{reader.folder / METADATA} is damaged: {name} is no tensor")
    if "schedule.last_epoch" not in saved:
        raise CheckpointError(f"{reader.folder} is not a checkpoint of this trainer")
    here = worker.module.state_dict()
    _check_tensors(reader.folder.parent, dict(_part(saved, "model.")), here)
    target = {f"model.{name}": torch.empty_like(tensor) for name, tensor in here.items()}
    parameters = dict(worker.module.named_parameters())
    for name, kind in _part(saved, "optimizer."):
        owner, _, key = name.rpartition(".")
        if owner not in parameters:
            raise CheckpointError(f"{reader.folder.parent} trains {owner}, this run does not{_model()}")
        whole = key == "step" or kind.size != parameters[owner].shape
        like = torch.empty(kind.size) if whole else parameters[owner].detach()
        target[f"optimizer.{name}"] = torch.empty_like(like, dtype=kind.properties.dtype)
    for name, kind in _part(saved, "schedule."):
        target[f"schedule.{name}"] = torch.empty(kind.size, dtype=kind.properties.dtype)
    target |= {name: torch.empty_like(state) for name, state in _rng_states(worker).items() if name in saved}
    return target


def _part(saved: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    return ((name.removeprefix(prefix), kind) for name, kind in saved.items() if name.startswith(prefix))


def _check_tensors(folder: Path, saved: dict[str, Any], here: dict[str, Tensor]) -> None:
    for name, tensor in here.items():
        if name not in saved:
            raise CheckpointError(f"{folder} has no tensor {name}: it is of another model{_model()}")
        size, dtype = saved[name].size, saved[name].properties.dtype
        if size != tensor.shape or dtype != tensor.dtype:
            raise CheckpointError(
                f"{folder}: {name} is {_shape(size, dtype)}, in this run's model {_shape(tensor.shape, tensor.dtype)}"
                f"{_model()}"
            )
    extra = next((name for name in saved if name not in here), None)
    if extra is not None:
        raise CheckpointError(f"{folder}: this run's model has no tensor {extra}{_model()}")


def _model() -> str:
    return "; take the model.path, lora_rank and model_dtype it was saved with"


def _shape(size: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(size)}"


# -------------------------------------------------------------------------------------------------------------- put


def _put(read: dict[str, Tensor], worker: TrainingWorker) -> int:
    """The moments and the place in the schedule are those that were read; rates and decay are this run's own."""
    worker.module.load_state_dict(dict(_part(read, "model.")))
    optimizer, schedule = worker.optimizer, worker.scheduler
    names, groups = _names(worker), optimizer.state_dict()["param_groups"]
    trained = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    states: dict[str, dict[str, Tensor]] = {}
    for name, tensor in _part(read, "optimizer."):
        owner, _, key = name.rpartition(".")
        states.setdefault(owner, {})[key] = tensor
    numbered = {at: states[name] for at, name in enumerate(trained) if name in states}
    optimizer.load_state_dict({"state": numbered, "param_groups": groups})
    schedule.load_state_dict(schedule.state_dict() | {name: int(count) for name, count in _part(read, "schedule.")})
    rates = zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True)
    for group, peak, factor in rates:
        group["lr"] = peak * factor(schedule.last_epoch)
    for name in _rng_states(worker).keys() & read.keys():
        if name.endswith(_CUDA):
            torch.cuda.set_rng_state(read[name], worker.device)
        else:
            torch.set_rng_state(read[name])
    watched = states.get(trained[worker.step_watch.position], {})
    return int(watched.get("step", 0))
