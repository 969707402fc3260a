"""One rank of the training: actor and reference in a process of its own (verl's ``ActorRolloutRefWorker`` actor)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from lineage import hooks
from lineage.hooks import Scope, traced
from lineage.trainer.config import sequence_parallel_size
from lineage.trainer.engine.fsdp import device_mesh
from lineage.trainer.engine.process_group import destroy_process_group, host_store, init_process_group
from lineage.trainer.engine.ranks import Ranks
from lineage.trainer.engine.topology import fsdp_topology
from lineage.trainer.models import ModelFacts
from lineage.trainer.protocol import KVBatchMeta
from lineage.trainer.queue.transfer_queue import TransferQueue
from lineage.trainer.ray.errors import gather_results
from lineage.trainer.ray.log_relay import LogLine
from lineage.trainer.ray.recording import RunProcess, RunTrace
from lineage.trainer.rng import seed_all
from lineage.trainer.setup import device_of, load_module, make_worker, record_init, source_and_tokenizer
from lineage.trainer.weight_sync import RECEIVER, UPDATE, send


class RankProcess(RunProcess):
    """A rank. What the driver asks of it, it asks of all ranks at once, each with the keys of its own rows.

    Ranks that share sequences out are neighbours and have the same rows; ``coord.sp`` tells them apart.

    Args:
        trace: how the process records.
        rank, world: its number, and how many there are.
        config: the configuration.
    """

    def __init__(self, trace: RunTrace, rank: int, world: int, config: Any) -> None:
        self.sp = sequence_parallel_size(config)
        dp, sp = divmod(rank, self.sp)
        coord = {"dp": dp} if self.sp == 1 else {"dp": dp, "sp": sp}
        super().__init__(trace, f"actor:{rank}", rank=rank, coord=coord)
        self.rank, self.world = rank, world
        self.config = config
        self._store: Any = None

    def host_store(self) -> str:
        """Open the place where the ranks meet, on the first of them; its address, ``host:port``."""
        host = ray.util.get_node_ip_address()
        self._store = host_store(host)
        return f"{host}:{self._store.port}"

    @traced("init", component="PPOTrainer.init", consumer="PPOTrainer.fit")
    def init_model(self, address: str, total_training_steps: int) -> ModelFacts:
        """Join the others and build the engine of actor and reference; all ranks at once.

        Args:
            address: of the first rank's store, ``host:port``.
            total_training_steps: length of the run.
        """
        config = self.config
        device, fsdp_size = device_of(config.trainer.device), config.actor_rollout_ref.actor.fsdp_config.fsdp_size
        host, _, port = address.rpartition(":")
        init_process_group(
            self.rank, self.world, master_addr=host, master_port=int(port), hosted=self._store, device=device
        )
        seed_all(config.trainer.seed)
        source, tokenizer = source_and_tokenizer(config)
        module = load_module(config, source)
        facts = ModelFacts.of(module, tokenizer)
        self.worker = make_worker(
            config,
            hooks.trace_queue(TransferQueue()),
            module,
            tokenizer,
            total_training_steps,
            fsdp_topology(self.world, fsdp_size, sp=self.sp, rollout_dp=config.actor_rollout_ref.rollout.num_replicas),
            ranks=Ranks.of_process(self.sp),
            mesh=device_mesh(self.world, fsdp_size, device),
        )
        record_init(self.worker)
        return facts

    def get_topology(self) -> Any:
        """What the engine reports."""
        return self.worker.topology

    def compute_log_prob(self, scope: Scope | None, batch: KVBatchMeta) -> None:
        """See ``ActorRolloutRefWorker.compute_log_prob``."""
        with self._working(scope, batch):
            self.worker.compute_log_prob(batch)

    def compute_ref_log_prob(self, scope: Scope | None, batch: KVBatchMeta) -> None:
        """See ``ActorRolloutRefWorker.compute_ref_log_prob``."""
        with self._working(scope, batch):
            self.worker.compute_ref_log_prob(batch)

    def update_actor(self, scope: Scope | None, batch: KVBatchMeta) -> dict[str, float]:
        """See ``ActorRolloutRefWorker.update_actor``."""
        with self._working(scope, batch):
            return self.worker.update_actor(batch)

    def save_checkpoint(self, scope: Scope | None, folder: Path) -> None:
        """See ``ActorRolloutRefWorker.save_checkpoint``."""
        with hooks.inside(scope):
            self.worker.save_checkpoint(folder)

    def load_checkpoint(self, scope: Scope | None, folder: Path, global_steps: int) -> int:
        """See ``ActorRolloutRefWorker.load_checkpoint``."""
        with hooks.inside(scope):
            return self.worker.load_checkpoint(folder, global_steps)

    def update_weights(self, scope: Scope | None, replicas: Mapping[str, Any], global_steps: int) -> None:
        """Gather the tensors with the other ranks; the first rank sends them to every replica of the rollout.

        Args:
            replicas: handles of the replicas, by the names of their processes.
        """
        recording = hooks.recorder().enabled and bool(self.config.trace.weights)
        with hooks.inside(scope), traced("weight_sync", component=UPDATE, consumer=RECEIVER):
            sent = send(self.worker, global_steps, recording=recording)
        if self.rank == 0:
            once = ray.put(sent)
            gather_results(
                {name: each.update_weights.remote(scope, once, global_steps) for name, each in replicas.items()},
                "update_weights",
            )

    def close(self, error: str | None = None) -> list[LogLine]:
        """The run has ended: close what this rank recorded, and leave the others."""
        lines = super().close(error)
        destroy_process_group()
        self._store = None
        return lines

    @contextmanager
    def _working(self, scope: Scope | None, batch: KVBatchMeta) -> Iterator[None]:
        """In the driver's stage, with what is known of the batch's keys: every row carries their tags and slots."""
        if hooks.recorder().tracing:
            slots = self.worker.queue.global_indexes(batch.keys, batch.partition_id)
            self.know(batch.keys, batch.tags, slots)
        with hooks.inside(scope):
            yield
