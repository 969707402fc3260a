"""The training side of the model: actor and reference behind the calls the driver makes.

verl's ``ActorRolloutRefWorker``. It is told *which* trajectories (keys) and gets and puts their values at the queue
itself, so the driver never carries tensors to it. One process plays every data-parallel rank and is told of the whole
batch, or there is a worker for each rank, told of its own part: ``scored_by`` and ``trained_by`` say which that is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensordict import TensorDict
from torch import Tensor, nn

from lineage import hooks
from lineage.hooks import LineageError, Sampling, Topology, Weights, traced
from lineage.trainer.batching.balance import deal, deal_to_score
from lineage.trainer.batching.micro_batches import MicroBatchLimit
from lineage.trainer.engine.ranks import Ranks
from lineage.trainer.engine.sharded import full
from lineage.trainer.engine.ulysses import share_sequences
from lineage.trainer.log_prob import RowScores
from lineage.trainer.policy import FrozenCopy, make_policy
from lineage.trainer.probe import probe, record_sample, to_probe
from lineage.trainer.protocol import KVBatchMeta, nested_from_list
from lineage.trainer.reward.loop_manager import EXTRA_KEYS
from lineage.trainer.training import SequenceRows, TrainingWorker, infer_rows
from lineage.trainer.update_plan import UpdatePlan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

FORWARD_FIELDS = ("input_ids", "attention_mask", "position_ids")
UPDATE_FIELDS = (*FORWARD_FIELDS, "loss_mask", "old_log_probs", "advantages")


def update_fields(actor: Any, correction: Any) -> list[str]:
    """What an update reads: the loss decides.

    Args:
        actor: ``actor_rollout_ref.actor``.
        correction: ``algorithm.rollout_correction``. In bypass mode it leaves nothing in the queue.
    """
    names = [*UPDATE_FIELDS, *(["ref_log_prob"] if actor.use_kl_loss else [])]
    if not correction.bypass_mode:
        names += ["response_mask"] if correction.rollout_rs else []
        names += ["rollout_is_weights"] if correction.rollout_is else []
    return names


class MissingDataError(LineageError):
    """The queue gave fewer rows or fields than were asked for (it does so silently)."""


def fetch(queue: Any, batch: KVBatchMeta, fields: Sequence[str]) -> TensorDict:
    """Fields of a batch from the queue, every row and every field of them.

    Raises:
        MissingDataError: a row or a field did not come back.
    """
    data = queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(fields))
    lost = [name for name in fields if name not in data.keys()]  # noqa: SIM118 - a TensorDict iterates over rows
    if lost or len(data) != len(batch):
        what = f"without {', '.join(lost)}: some row lacks it" if lost else f"{len(data)} of {len(batch)} rows"
        raise MissingDataError(f"the queue returned a batch of partition {batch.partition_id} {what}")
    return data


def scored_by(batch: KVBatchMeta, ranks: int) -> list[KVBatchMeta]:
    """The part of a batch whose log-probs each rank computes, by rank."""
    return [_part(batch, places) for places in deal_to_score(len(batch), ranks)]


def trained_by(batch: KVBatchMeta, ranks: int) -> list[KVBatchMeta]:
    """The part of a batch each rank trains on, by rank."""
    return [_part(batch, places) for places in deal(len(batch), ranks)]


def _part(batch: KVBatchMeta, places: Sequence[int]) -> KVBatchMeta:
    return batch.select_keys([batch.keys[place] for place in places])


class ActorRolloutRefWorker:
    """One model engine with the roles actor and, if it is needed, reference.

    Args:
        queue: TransferQueue's interface.
        module: the model to train; with a LoRA adapter, its layers are changed in place.
        config: ``actor_rollout_ref`` of the configuration.
        correction: ``algorithm.rollout_correction``.
        topology: parallel layout of the engine.
        total_training_steps: length of the run.
        pad_token_id: fills sequences on the right.
        with_reference: keep a reference policy: the actor without its adapter, or a frozen copy of the first weights.
        batches_per_step: updates of a training step.
        record_weights: record a sample of the reference's weights whenever it scores (``trace.weights``).
        probe: rows scored once more, each alone (``trace.probe``).
        ranks: the data-parallel group, of which this process plays one rank, alone or with others that share its
            sequences out; None plays all of them in turn.
        mesh: the ranks the model is sharded over (``engine.fsdp``); None keeps it whole.

    Attributes:
        policy: the actor as the rollout and the reference see it.
        reference: the reference policy, or None.
        version: of the actor's weights.
    """

    def __init__(
        self,
        queue: Any,
        module: nn.Module,
        config: Any,
        topology: Topology,
        *,
        correction: Any,
        total_training_steps: int,
        pad_token_id: int,
        with_reference: bool,
        batches_per_step: int = 1,
        record_weights: bool = True,
        probe: int = 0,
        ranks: Ranks | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.queue = queue
        self.record_weights = record_weights
        self.probe = probe
        self.config = config
        self.correction = correction
        self.topology = topology
        self.ranks = ranks or Ranks.embedded(topology.reported_dp)
        self.pad_token_id = pad_token_id
        self.version = 0
        if config.model.enable_gradient_checkpointing:
            module.gradient_checkpointing_enable()  # type: ignore[operator]
        if self.ranks.sequence is not None:
            share_sequences(module, self.ranks.sequence)
        self.policy = make_policy(module, config.model)
        self.reference = self.policy.reference() if with_reference else None
        if mesh is not None:
            self._shard(mesh)
        self.actor = TrainingWorker(
            self.policy.module,
            config.actor,
            topology,
            total_training_steps=total_training_steps,
            pad_token_id=pad_token_id,
            batches_per_step=batches_per_step,
            adapter=self.policy.adapter,
            bypass=correction if correction.bypass_mode else None,
            ranks=self.ranks,
        )

    def _shard(self, mesh: DeviceMesh) -> None:
        from lineage.trainer.engine.fsdp import shard  # a second of imports, for those who shard

        own, reference = self.config.actor.fsdp_config, self.config.ref.fsdp_config
        shard(self.policy.module, mesh, reshard_after_forward=own.reshard_after_forward)
        if isinstance(self.reference, FrozenCopy):
            again = reference.reshard_after_forward
            shard(self.reference.module, mesh, reshard_after_forward=again, offload=reference.param_offload)

    @property
    def weights(self) -> Weights:
        """The actor's weights as a trace names them."""
        return Weights(self.version, "actor", adapter=self.policy.adapter, training=self.actor.module.training)

    def get_data_parallel_size(self) -> int:
        """Logical data-parallel size the engine reports."""
        return self.topology.reported_dp

    def state_dict(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors the actor computes with, by the names the rollout knows: an adapter is merged into them.

        Whole on every rank, one after the other: all ranks take all of them.
        """
        yield from self.policy.tensors()

    def reference_state_dict(self) -> Iterator[tuple[str, Tensor]]:
        """The same of the reference; nothing without one."""
        for name, tensor in (self.reference.state_dict() if self.reference is not None else {}).items():
            yield name, full(tensor.detach())

    def status(self) -> list[str | None]:
        """Of each of :meth:`state_dict`, whether it is ``trainable`` or ``frozen``; None of a buffer."""
        trains = self.policy.parameters()
        names = self.policy.names()
        return [None if name not in trains else "trainable" if trains[name] else "frozen" for name in names]

    @traced("old_log_prob", component="ActorRolloutRefWorker.compute_log_prob", consumer="PPOTrainer")
    def compute_log_prob(self, batch: KVBatchMeta) -> None:
        """Write ``log_probs`` and ``entropy`` of the actor, at full sequence length."""
        rows = self._rows(batch, FORWARD_FIELDS)
        scores = self.actor.infer_batch(
            rows,
            micro_batches=MicroBatchLimit.of_log_prob(self.config.rollout, self.config.actor),
            temperature=self.config.rollout.temperature,
            with_entropy=True,
        )
        self._put(batch, {"log_probs": scores.log_probs, "entropy": scores.entropy}, scores, self.weights)
        self._probe(self.actor.module, batch, rows, scores)

    @traced("ref_log_prob", component="ActorRolloutRefWorker.compute_ref_log_prob", consumer="PPOTrainer")
    def compute_ref_log_prob(self, batch: KVBatchMeta) -> None:
        """Write ``log_probs`` of the reference at full sequence length, over the actor's."""
        if self.reference is None:
            raise LineageError("compute_ref_log_prob: this worker was built without a reference policy")
        rows, weights = self._rows(batch, FORWARD_FIELDS), Weights(0, "ref")
        with self.reference.scoring() as module:
            scores = infer_rows(
                module,
                rows,
                micro_batches=MicroBatchLimit.of_log_prob(self.config.ref, self.config.actor),
                ranks=self.ranks,
                temperature=self.config.rollout.temperature,
                with_entropy=False,
                pad_token_id=self.pad_token_id,
            )
            self._put(batch, {"log_probs": scores.log_probs}, scores, weights)
            self._probe(module, batch, rows, scores)
        if self.record_weights and self.ranks.agreed(hooks.recorder().tracing):
            record_sample(self.reference.state_dict(), weights, self.ranks)

    @traced("update_actor", component="ActorRolloutRefWorker.update_actor", consumer="PPOTrainer._compute_metrics")
    def update_actor(self, batch: KVBatchMeta) -> dict[str, float]:
        """Train on a batch; ``extra_info`` holds the plan as the driver wrote it.

        Returns:
            ``actor/*`` metrics, the same from every rank.
        """
        info = batch.extra_info
        plan = UpdatePlan(
            mini_batch_size=info["mini_batch_size"],
            micro_batches=MicroBatchLimit.of_update(self.config.actor),
            epochs=info["epochs"],
            temperature=info["temperature"],
            shuffle_seed=info["shuffle_seed"],
            version=info["global_steps"] - 1,
            first_update=info["first_update"],
            attrs={name: str(value) for name, value in info.items() if value is not None and name != EXTRA_KEYS},
        )
        rows = self._rows(batch, update_fields(self.config.actor, self.correction))
        dealt = deal(len(batch), len(self.ranks.played))
        for rank, places in zip(self.ranks.played, dealt, strict=False):
            keys = [batch.keys[place] for place in places]
            hooks.current().dispatch(keys, coord=self.ranks.coord(rank), attrs=plan.attrs)
        metrics = self.actor.train_mini_batch(rows.select([place for places in dealt for place in places]), plan)
        self.version = info["global_steps"]
        return metrics

    def save_checkpoint(self, folder: Path) -> None:
        """Write model, optimiser and schedule to a folder that is there, the same for every rank; all ranks take part.

        Raises:
            OSError, RuntimeError: the disk took no more.
        """
        from lineage.trainer.engine.model_state import save_state  # a second of imports, for those who save

        save_state(Path(folder), self.actor)
        self._record_checkpoint("produce")

    def load_checkpoint(self, folder: Path, global_steps: int) -> int:
        """Go on from a folder that was saved after that step, by whatever number of ranks; all ranks take part.

        Returns:
            The optimiser's steps by what was saved, the same on every rank.

        Raises:
            CheckpointError: it is damaged or does not fit; nothing is changed then.
        """
        from lineage.trainer.engine.model_state import load_state

        taken = load_state(Path(folder), self.actor)
        self.version = global_steps
        self._record_checkpoint("consume")
        return taken

    def _record_checkpoint(self, op: str) -> None:
        if self.ranks.agreed(hooks.recorder().tracing):
            tensors = dict(self.state_dict())
            if self.ranks.first:
                hooks.current().params(op, tensors, field="checkpoint", weights=self.weights)

    def _probe(self, module: nn.Module, batch: KVBatchMeta, rows: SequenceRows, scores: RowScores) -> None:
        if self.probe and self.ranks.agreed(hooks.recorder().tracing):
            padding = [tag["is_padding"] for tag in batch.tags]
            chosen = to_probe(rows.lengths("input_ids"), scores.behind, padding, self.probe, self.ranks)
            probe(module, rows, scores, self.config.rollout.temperature, chosen, self.ranks)

    def _rows(self, batch: KVBatchMeta, fields: Sequence[str]) -> SequenceRows:
        return SequenceRows.from_tensordict(batch.keys, fetch(self.queue, batch, fields), self.actor.device)

    def _put(self, batch: KVBatchMeta, columns: dict[str, list[Tensor]], scores: RowScores, weights: Weights) -> None:
        if not self.ranks.speaks:
            return
        values = {name: nested_from_list(rows).cpu() for name, rows in columns.items()}
        sampling = None if scores.temperature is None else Sampling(temperature=scores.temperature)
        weights = replace(weights, training=scores.training)
        hooks.current().forward(values, keys=batch.keys, span="sequence", weights=weights, sampling=sampling)
        self.queue.kv_batch_put(
            keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(values, batch_size=[len(batch)])
        )
