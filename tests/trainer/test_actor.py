"""The actor worker: told keys, it gets and puts values at the queue itself."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict

from lineage import hooks
from lineage.hooks import LineageError
from lineage.trainer.actor import ActorRolloutRefWorker, MissingDataError, fetch, update_fields
from lineage.trainer.config.actor_rollout_ref import ActorRolloutRefConfig
from lineage.trainer.config.ppo_trainer import RolloutCorrectionConfig
from lineage.trainer.engine.topology import embedded_topology
from lineage.trainer.models import load_model
from lineage.trainer.protocol import KVBatchMeta, lengths_of, nested_from_list
from lineage.trainer.queue import LocalTransferQueue
from lineage.trainer.reward.loop_manager import EXTRA_KEYS
from lineage.trainer.rollout.hf import HFRollout
from lineage.trainer.setup import use_few_threads
from lineage.trainer.tracking.dump import DumpError, dump_rollouts
from lineage.trainer.weight_sync import CheckpointEngineManager

KEYS = ["u_0_0", "u_1_0"]


@pytest.fixture
def queue():
    """Two trajectories of 5 and 7 tokens."""
    store = LocalTransferQueue()
    rows = [torch.arange(5, 10), torch.arange(5, 12)]
    fields = {
        "input_ids": nested_from_list(rows),
        "attention_mask": nested_from_list([torch.ones_like(row) for row in rows]),
        "position_ids": nested_from_list([torch.arange(len(row)) for row in rows]),
        "prompts": nested_from_list([row[:3] for row in rows]),
        "responses": nested_from_list([row[3:] for row in rows]),
        "rm_scores": nested_from_list([torch.zeros(len(row) - 3) for row in rows]),
    }
    store.kv_batch_put(KEYS, "train", TensorDict(fields, batch_size=[2]))
    return store


@pytest.fixture
def batch():
    """The two by key."""
    tags = [{"is_padding": False, "prompt_len": 3, "response_len": length} for length in (2, 4)]
    return KVBatchMeta(KEYS, tags, "train")


@pytest.fixture
def worker(tiny, queue):
    """Actor and reference on the tiny model."""
    return make_worker(tiny, queue)


def make_worker(tiny, queue, lora_rank=0):
    """The same, with an adapter of that rank."""
    model = load_model(tiny)
    use_few_threads(model)
    config = OmegaConf.structured(ActorRolloutRefConfig())
    config.model.lora_rank = lora_rank
    return ActorRolloutRefWorker(
        queue,
        model,
        config,
        embedded_topology(1, 1),
        correction=OmegaConf.structured(RolloutCorrectionConfig()),
        total_training_steps=1,
        pad_token_id=0,
        with_reference=True,
    )


def test_log_probs_are_written_at_full_length(worker, queue, batch):
    """compute_log_prob puts log_probs and entropy as long as the sequence."""
    worker.compute_log_prob(batch)
    data = queue.kv_batch_get(KEYS, "train", ["log_probs", "entropy"])
    assert lengths_of(data["log_probs"]).tolist() == lengths_of(data["entropy"]).tolist() == [5, 7]
    assert (data["log_probs"].values() <= 0).all()


def test_the_reference_is_a_frozen_copy(worker, queue, batch):
    """It scores like the actor at first, and stays when the actor moves."""
    worker.compute_log_prob(batch)
    own = queue.kv_batch_get(KEYS, "train", ["log_probs"])["log_probs"].values()
    worker.compute_ref_log_prob(batch)
    first = queue.kv_batch_get(KEYS, "train", ["log_probs"])["log_probs"].values()
    assert torch.equal(own, first)
    with torch.no_grad():
        worker.actor.module.lm_head.weight.mul_(2.0)
    worker.compute_ref_log_prob(batch)
    assert torch.equal(queue.kv_batch_get(KEYS, "train", ["log_probs"])["log_probs"].values(), first)
    assert not any(parameter.requires_grad for parameter in worker.reference.module.parameters())


def test_the_reference_of_an_adapter_is_the_model_it_is_on(tiny, queue, batch):
    """At first it scores bit for bit like the actor; it stays when the adapter moves."""
    worker = make_worker(tiny, queue, lora_rank=4)

    def scored(compute):
        compute(batch)
        return queue.kv_batch_get(KEYS, "train", ["log_probs"])["log_probs"].values()

    own, first = scored(worker.compute_log_prob), scored(worker.compute_ref_log_prob)
    assert torch.equal(own, first)
    with torch.no_grad():
        for name, tensor in worker.actor.module.named_parameters():
            if "lora_B" in name:
                tensor.fill_(0.1)
    assert torch.equal(scored(worker.compute_ref_log_prob), first)
    assert not torch.allclose(scored(worker.compute_log_prob), own, atol=1e-3)


def test_an_update_reads_what_its_loss_needs():
    """The reference only for its term; the rewritten mask and the weights only where the correction leaves them."""

    def extra(use_kl_loss=False, **correction):
        actor = OmegaConf.structured(ActorRolloutRefConfig()).actor
        actor.use_kl_loss = use_kl_loss
        names = update_fields(actor, OmegaConf.structured(RolloutCorrectionConfig(**correction)))
        return set(names) - {"input_ids", "attention_mask", "position_ids", "loss_mask", "old_log_probs", "advantages"}

    assert extra() == set()
    assert extra(use_kl_loss=True) == {"ref_log_prob"}
    assert extra(rollout_is="token") == {"rollout_is_weights"}
    assert extra(rollout_rs="token_k1") == {"response_mask"}
    assert extra(bypass_mode=True, rollout_is="token", rollout_rs="token_k1") == set()


def test_without_a_reference_there_is_nothing_to_compute(worker, batch):
    """Asking for reference log-probs of a worker without one is an error that says so."""
    worker.reference = None
    with pytest.raises(LineageError, match="without a reference"):
        worker.compute_ref_log_prob(batch)


def test_what_the_queue_drops_is_noticed(queue, batch):
    """A row that is gone, or a field that one row lacks, stops the step instead of shrinking it."""
    with pytest.raises(MissingDataError, match="without nothing_here"):
        fetch(queue, batch, ["input_ids", "nothing_here"])
    queue.kv_clear(KEYS[:1], "train")
    with pytest.raises(MissingDataError, match="1 of 2 rows"):
        fetch(queue, batch, ["input_ids"])


def test_weight_sync_gives_the_rollout_the_actors_weights(worker):
    """After a sync the engine has the actor's tensors bit for bit, under the version, awake, in a new cache epoch."""
    rollout = HFRollout(worker.policy.resident_copy(), eos_token_ids=[3], pad_token_id=0)
    manager = CheckpointEngineManager(worker, [rollout])
    with torch.no_grad():
        worker.actor.module.lm_head.weight.add_(0.5)
    manager.update_weights(3)
    assert (rollout.version, rollout.asleep, rollout.cache_epoch) == (3, False, 1)
    sent, received = dict(worker.state_dict()), rollout.resident()
    assert sent.keys() == received.keys()
    assert all(torch.equal(tensor, received[name]) for name, tensor in sent.items())
    assert all(tensor.data_ptr() != received[name].data_ptr() for name, tensor in sent.items())
    manager.sleep_replicas()
    assert rollout.asleep


def test_synced_weights_are_named_with_their_adapter(tiny, queue, tmp_path):
    """The rows of a sync say of the actor what its other rows say."""
    worker = make_worker(tiny, queue, lora_rank=2)
    rollout = HFRollout(worker.policy.resident_copy(), eos_token_ids=[3], pad_token_id=0)
    with hooks.recording(tmp_path, config={}, run={}):
        hooks.recorder().step(1)
        CheckpointEngineManager(worker, [rollout]).update_weights(1)
    rows = pq.read_table(tmp_path / "trace.parquet").to_pylist()
    named = {row["weights"]["adapter"] for row in rows if row["op"] == "sync" and row["weights"]["phase"] == "actor"}
    assert named == {worker.policy.adapter} != {None}


@pytest.mark.parametrize("colocated", [False, True])
def test_a_dump_has_what_the_scorer_said_beside_the_score(queue, batch, tokenizer, tmp_path, colocated):
    """Of the session where it was scored there, by key where the batch was scored as a whole."""
    said = [{"score": 0.0, "note": "short"}, {"score": 0.0, "note": "long"}]
    if colocated:
        fields = {name: NonTensorStack(*[one[name] for one in said]) for name in said[0]}
        batch.extra_info[EXTRA_KEYS] = list(fields)
    else:
        fields = {"extra_fields": NonTensorStack(*[{"reward_extra_info": one} for one in said])}
    queue.kv_batch_put(KEYS, "train", TensorDict(fields, batch_size=[2]))
    lines = [json.loads(line) for line in dump_rollouts(tmp_path, 4, queue, batch, tokenizer).read_text().splitlines()]
    assert [line["note"] for line in lines] == ["short", "long"]


def test_dump_leaves_padding_out(queue, batch, tokenizer, tmp_path):
    """One line a real trajectory, with its key."""
    batch.tags[1]["is_padding"] = True
    path = dump_rollouts(tmp_path, 4, queue, batch, tokenizer)
    lines = path.read_text().splitlines()
    assert path.name == "4.jsonl"
    assert len(lines) == 1
    assert KEYS[0] in lines[0]


def test_a_dump_folder_that_cannot_be_written_is_one_line(queue, batch, tokenizer, tmp_path):
    """A file in the way is named with the key to set."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(DumpError, match="rollout_data_dir"):
        dump_rollouts(blocked / "inside", 1, queue, batch, tokenizer)
