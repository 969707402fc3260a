"""The ranks that train, behind the calls the driver makes of one worker (verl ``RayWorkerGroup``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lineage import hooks
from lineage.hooks import LineageError, Topology
from lineage.trainer.actor import scored_by, trained_by
from lineage.trainer.models import ModelFacts
from lineage.trainer.protocol import KVBatchMeta
from lineage.trainer.ray.errors import gather_results


class WorkerGroup:
    """One actor process a rank. Every call goes to all of them, each with the keys of its own rows.

    Args:
        ranks: handles of ``RankProcess``, by rank.
        sp: neighbouring ranks that share the sequences of a replica, and so have the same rows.

    Attributes:
        topology: what the engine reports, once it is built.
    """

    topology: Topology

    def __init__(self, ranks: Sequence[Any], sp: int = 1) -> None:
        self.ranks = list(ranks)
        self.sp = sp
        self.replicas = len(self.ranks) // sp

    def init_model(self, total_training_steps: int) -> ModelFacts:
        """Have the ranks meet and build their engines."""
        (address,) = gather_results({"actor:0": self.ranks[0].host_store.remote()}, "init_model")
        facts: list[ModelFacts] = self.call("init_model", address, total_training_steps)
        self.topology = gather_results({"actor:0": self.ranks[0].get_topology.remote()}, "init_model")[0]
        return facts[0]

    def get_data_parallel_size(self) -> int:
        """Logical data-parallel size the engine reports."""
        return self.topology.reported_dp

    def compute_log_prob(self, batch: KVBatchMeta) -> None:
        """Write ``log_probs`` and ``entropy`` of the actor, at full sequence length."""
        self._dispatch("compute_log_prob", scored_by(batch, self.replicas))

    def compute_ref_log_prob(self, batch: KVBatchMeta) -> None:
        """Write ``log_probs`` of the reference at full sequence length, over the actor's."""
        self._dispatch("compute_ref_log_prob", scored_by(batch, self.replicas))

    def update_actor(self, batch: KVBatchMeta) -> dict[str, float]:
        """Train on a batch; ``extra_info`` holds the plan. Returns ``actor/*`` metrics, the same on every rank."""
        metrics: list[dict[str, float]] = self._dispatch("update_actor", trained_by(batch, self.replicas))
        return metrics[0]

    def save_checkpoint(self, folder: Path) -> None:
        """Have every rank write what it holds of model, optimiser and schedule to a folder they all see."""
        self.call("save_checkpoint", hooks.scope(), folder.resolve())

    def load_checkpoint(self, folder: Path, global_steps: int) -> int:
        """Go on from such a folder, whatever number of ranks wrote it; the optimiser's steps by what was saved."""
        taken: list[int] = self.call("load_checkpoint", hooks.scope(), folder.resolve(), global_steps)
        return taken[0]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Have every rank do the same; what each returned, by rank.

        Raises:
            ProcessDiedError, Exception: as :func:`lineage.trainer.ray.errors.gather_results`.
        """
        calls = {f"actor:{rank}": getattr(process, method).remote(*arguments) for rank, process in self._numbered()}
        return gather_results(calls, method)

    def _dispatch(self, method: str, parts: Sequence[KVBatchMeta]) -> list[Any]:
        rows = [len(part) for part in parts]
        if len(rows) != self.replicas or not all(rows):  # a rank that is not asked leaves the others in a collective
            raise LineageError(
                f"{method}: a batch of {sum(rows)} rows has none for some of the {self.replicas} ranks; the balance "
                "stage pads a batch until every rank has equally many"
            )
        scope = hooks.scope()
        calls = {
            f"actor:{rank}": getattr(process, method).remote(scope, parts[rank // self.sp])
            for rank, process in self._numbered()
        }
        return gather_results(calls, method)

    def _numbered(self) -> list[tuple[int, Any]]:
        return list(enumerate(self.ranks))
