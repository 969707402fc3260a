"""One process of a distributed run: it does every job and leaves what came of it in a file.

``python rank_process.py FOLDER RANK WORLD PORT``, started by ``test_fsdp``; a world of 0 is the embedded trainer, which
plays 1, 2 and 4 ranks. With a fifth word, by ``test_ulysses``, so many processes play each rank together, and the
embedded trainer plays 1 and 2.
"""

from __future__ import annotations

import copy
import shutil
import sys
import traceback
from pathlib import Path

import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

from lineage import hooks
from lineage.trainer.actor import ActorRolloutRefWorker, scored_by, trained_by
from lineage.trainer.checkpoint import CheckpointError
from lineage.trainer.config.actor_rollout_ref import ActorRolloutRefConfig
from lineage.trainer.config.ppo_trainer import RolloutCorrectionConfig
from lineage.trainer.engine.fsdp import device_mesh
from lineage.trainer.engine.process_group import destroy_process_group, init_process_group
from lineage.trainer.engine.ranks import Ranks
from lineage.trainer.engine.sharded import full
from lineage.trainer.engine.topology import embedded_topology, fsdp_topology
from lineage.trainer.engine.ulysses import SequenceParallel, share_sequences
from lineage.trainer.models import find_model, load_model
from lineage.trainer.protocol import KVBatchMeta, nested_from_list
from lineage.trainer.queue import LocalTransferQueue

ROWS = 8
# its first step would else be the sign of the gradient, which a last bit can turn
SMOOTH = "actor.optim.eps=0.01"


class Place:
    """Where the jobs run: a world of processes, ``sp`` to a rank, of which this is one, or one that plays all ranks."""

    def __init__(self, rank: int, world: int, ranks: int, sp: int = 1) -> None:
        self.rank, self.world, self.size, self.sp = rank, world, ranks, sp
        self.model = load_model(find_model("tiny"))

    def worker(self, *overrides: str, fsdp_size: int = -1, correction=None, tied: bool = False, probe: int = 0):
        """Actor and reference on the tiny model, and a queue with eight rows of uneven lengths."""
        config = OmegaConf.merge(OmegaConf.structured(ActorRolloutRefConfig()), OmegaConf.from_dotlist(list(overrides)))
        correction = OmegaConf.structured(RolloutCorrectionConfig(**(correction or {})))
        model = copy.deepcopy(self.model)
        if tied:
            model.lm_head.weight = model.get_input_embeddings().weight
        distributed = {}
        if self.world:
            mesh = device_mesh(self.world, fsdp_size)
            distributed = {"ranks": Ranks.of_process(self.sp), "mesh": mesh}
        torch.manual_seed(7)  # of an adapter: every rank draws the same first weights
        return ActorRolloutRefWorker(
            make_queue(),
            model,
            config,
            fsdp_topology(self.world, fsdp_size, sp=self.sp) if self.world else embedded_topology(1, self.size),
            correction=correction,
            total_training_steps=4,
            pad_token_id=0,
            with_reference=True,
            probe=probe,
            **distributed,
        )

    def scores(self, batch):
        """The part of a batch this process is told to score."""
        return scored_by(batch, self.size)[self.rank // self.sp] if self.world else batch

    def trains(self, batch):
        """The part of a batch this process is told to train on."""
        return trained_by(batch, self.size)[self.rank // self.sp] if self.world else batch


def make_queue():
    """Eight trajectories with everything an update reads; all ranks draw the same."""
    generator, store = torch.Generator().manual_seed(0), LocalTransferQueue()
    columns: dict[str, list] = {}
    for row in range(ROWS):
        prompt, response = 3 + row % 3, 2 + (5 * row) % 7
        mask = torch.ones(response, dtype=torch.long)
        mask[0] = row % 2
        made = {
            "input_ids": torch.randint(5, 90, (prompt + response,), generator=generator),
            "attention_mask": torch.ones(prompt + response, dtype=torch.long),
            "position_ids": torch.arange(prompt + response),
            "loss_mask": mask,
            "response_mask": mask.clone(),
            "old_log_probs": -4.6 + 0.1 * torch.randn(response, generator=generator),
            "ref_log_prob": -4.6 + 0.1 * torch.randn(response, generator=generator),
            "advantages": torch.randn(1, generator=generator).expand(response) * mask,
        }
        for name, tensor in made.items():
            columns.setdefault(name, []).append(tensor)
    fields = {name: nested_from_list(rows) for name, rows in columns.items()}
    store.kv_batch_put(keys(), "train", TensorDict(fields, batch_size=[ROWS]))
    return hooks.trace_queue(store)


def keys():
    """Keys of the rows."""
    return [f"u_{row}_0" for row in range(ROWS)]


def make_batch(**info):
    """The rows by key, with the plan of an update of two epochs and two mini-batches each."""
    plan = {
        "mini_batch_size": 4,
        "epochs": 2,
        "temperature": 1.0,
        "shuffle_seed": 3,
        "global_steps": 1,
        "first_update": 0,
        "sub_step": 0,
    }
    tags = [{"is_padding": False} for _ in range(ROWS)]
    return KVBatchMeta(keys(), tags, "train", extra_info={**plan, **info})


def scored(place, worker, compute):
    """Log-probs by key of the rows that were scored here; of several processes of a rank the first has put them."""
    part = place.scores(make_batch())
    compute(part)
    if place.rank % place.sp:
        return {}
    values = worker.queue.kv_batch_get(part.keys, "train", ["log_probs"])["log_probs"]
    return dict(zip(part.keys, values.unbind(), strict=True))


def trained(place, worker, **info):
    """Metrics, gradients as each step was given them, and weights of one update."""
    gradients = []

    def keep(optimizer, *_):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        grads = [torch.zeros(0) if p.grad is None else full(p.grad).clone().reshape(-1) for p in parameters]
        gradients.append(torch.cat(grads))

    handle = worker.actor.optimizer.register_step_pre_hook(keep)
    metrics = worker.update_actor(place.trains(make_batch(**info)))
    handle.remove()
    weights = {name: tensor.clone() for name, tensor in worker.state_dict()}
    return {"metrics": metrics, "gradients": gradients, "weights": weights}


# --------------------------------------------------------------------------------------------------------------- jobs


def plain(place):
    """Log-probs of actor and reference, and an update by one row a forward pass."""
    worker = place.worker(SMOOTH, "actor.ppo_micro_batch_size_per_gpu=1")
    first = {name: tensor.clone() for name, tensor in worker.state_dict()}
    own, reference = (scored(place, worker, call) for call in (worker.compute_log_prob, worker.compute_ref_log_prob))
    update = trained(place, worker)
    later = scored(place, worker, worker.compute_log_prob)
    return {"first": first, "log_probs": own, "ref": reference, "later": later, "status": worker.status(), **update}


def packed(place):
    """An update by tokens, the entropy in its loss, and a norm that is clipped."""
    overrides = ("actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=20", "actor.entropy_coeff=0.01")
    return trained(place, place.worker(SMOOTH, *overrides, "actor.grad_clip=0.05"))


def offloaded(place):
    """The reference with its parameters on the host, and everything resharded after the forward pass or nothing."""
    overrides = ("ref.fsdp_config.param_offload=true", "actor.fsdp_config.reshard_after_forward=false")
    worker = place.worker(SMOOTH, *overrides)
    reference = scored(place, worker, worker.compute_ref_log_prob)
    return {"ref": reference, **trained(place, worker)}


def tied(place):
    """Embeddings tied, activations recomputed."""
    worker = place.worker(SMOOTH, "model.enable_gradient_checkpointing=true", tied=True)
    made = trained(place, worker)
    parameters = dict(worker.policy.module.named_parameters(remove_duplicate=False))
    one = parameters["model.embed_tokens.weight"] is parameters["lm_head.weight"]
    return {"one": one, **made}


def adapter(place):
    """A LoRA adapter, scored by the reference before anything else, as in bypass mode."""
    overrides = ("model.lora_rank=4", "model.enable_gradient_checkpointing=true", "actor.optim.lr=0.02")
    worker = place.worker(SMOOTH, *overrides)
    reference = scored(place, worker, worker.compute_ref_log_prob)
    made = trained(place, worker, epochs=3)
    again = scored(place, worker, worker.compute_ref_log_prob)
    return {"ref": reference, "again": again, "status": worker.status(), **made}


def bypass(place):
    """The metrics that are made of every rank's log-probs."""
    return trained(
        place,
        place.worker(SMOOTH, correction={"bypass_mode": True, "rollout_rs": "token_k1", "rollout_rs_threshold": 1.05}),
    )


def hybrid(place):
    """Copies of the model by twos, where there are enough ranks."""
    return trained(place, place.worker(SMOOTH, fsdp_size=2))


def traced(place, folder):
    """Two steps with a trace."""
    options = {}
    if place.world:
        dp, sp = divmod(place.rank, place.sp)
        coord = {"dp": dp} if place.sp == 1 else {"dp": dp, "sp": sp}
        options = {"process": f"actor:{place.rank}", "rank": place.rank, "coord": coord}
    with hooks.recording(folder, run_id="run", **options) as recorder:
        worker = place.worker("actor.optim.eps=1e-5", "actor.ppo_micro_batch_size_per_gpu=1", probe=2)
        for step in (1, 2):
            recorder.step(step)
            worker.compute_log_prob(place.scores(make_batch()))
            worker.compute_ref_log_prob(place.scores(make_batch()))
            worker.update_actor(place.trains(make_batch(global_steps=step)))
    return None


def attention(place):
    """How far logits and gradients of a model whose sequences all processes share are from those of a whole one.

    Rows of unequal lengths, whole ones, lengths that do not divide, and one shorter than there are processes.
    """
    sequence = SequenceParallel(place.world, place.rank, torch.distributed.group.WORLD)
    alone, shared = copy.deepcopy(place.model), copy.deepcopy(place.model)
    share_sequences(shared, sequence)
    generator, far = torch.Generator().manual_seed(1), []
    for lengths in ((9, 6, 4), (8, 8), (7,), (3, 1)):
        ids, mask, positions = (torch.zeros(len(lengths), max(lengths), dtype=torch.long) for _ in range(3))
        for row, length in enumerate(lengths):
            ids[row, :length] = torch.randint(5, 90, (length,), generator=generator)
            mask[row, :length], positions[row, :length] = 1, torch.arange(length)
        one = alone(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        own = shared(
            input_ids=sequence.own(ids), attention_mask=mask, position_ids=sequence.own(positions), use_cache=False
        ).logits
        other = sequence.whole(own.transpose(1, 2), ids.shape[1]).transpose(1, 2)
        weights = torch.randn(one.shape, generator=generator) * mask.unsqueeze(-1)
        for module, logits in ((alone, one), (shared, other)):
            module.zero_grad()
            (logits * weights).sum().backward()
        pairs = list(zip(alone.parameters(), shared.parameters(), strict=True))
        for _, parameter in pairs:
            torch.distributed.all_reduce(parameter.grad)
        kept = mask.bool()
        apart = [float((one.grad - other.grad).abs().max() / one.grad.abs().max()) for one, other in pairs]
        far.append({"logits": float((one - other).detach()[kept].abs().max()), "gradients": max(apart)})
    return far


def resumed(place, folder):
    """What is there is loaded and trained on; a checkpoint of this world's is left for the others.

    All ranks together train on all rows at once: which rows else share a mini-batch depends on the number of ranks.
    """
    onwards = {"global_steps": 2, "mini_batch_size": ROWS, "epochs": 1}
    made = {}
    for saved in sorted(folder.glob("saved_by_*")):
        worker = place.worker(SMOOTH)
        steps = worker.load_checkpoint(saved, 1)
        loaded = {name: tensor.clone() for name, tensor in worker.state_dict()}
        made[saved.name] = {"steps": steps, "loaded": loaded, **trained(place, worker, **onwards)}
    worker = place.worker(SMOOTH)
    saved = trained(place, worker)["weights"]
    mine = folder / f"saved_by_{place.world}"
    if place.rank == 0:
        mine.mkdir()
    if place.world:
        torch.distributed.barrier()
    worker.save_checkpoint(mine)
    made["straight"] = {"steps": 4, "loaded": saved, **trained(place, worker, **onwards)}
    return made


def refused(place, folder):
    """What this rank says of a checkpoint that is damaged, of another model or not there, and of uneven parts."""
    damaged, said, worker = folder / f"damaged_{place.world}", [], place.worker(SMOOTH)
    before = {name: tensor.clone() for name, tensor in worker.state_dict()}
    if place.rank == 0:
        shutil.copytree(folder / f"saved_by_{place.world}", damaged)
        torn = sorted(damaged.glob("*.distcp"))[-1]
        torn.write_bytes(torn.read_bytes()[:200])
    if place.world:
        torch.distributed.barrier()
    other = place.worker(SMOOTH, "model.lora_rank=2")
    for tried, path in ((worker, damaged), (other, damaged), (worker, folder / "nowhere")):
        try:
            tried.load_checkpoint(path, 1)
        except CheckpointError as error:
            said.append(str(error))
    uneven = make_batch().select_keys(keys()[: 4 if place.rank == 0 else 2])
    for call in (worker.compute_log_prob, worker.update_actor) if place.world > 1 else ():
        try:
            call(uneven)
        except ValueError as error:
            said.append(str(error))
    same = all(torch.equal(tensor, before[name]) for name, tensor in worker.state_dict())
    return {"said": said, "same": same}


#: what is done, and by worlds of which size
JOBS = {
    plain: (1, 2, 4),
    packed: (1, 2, 4),
    offloaded: (2,),
    tied: (1, 2),
    adapter: (1, 2, 4),
    bypass: (2,),
    hybrid: (4,),
}


#: what processes that share sequences do
SHARED = (plain, packed, tied, adapter, bypass)


def main(folder: Path, rank: int, world: int, port: int, sp: int = 1) -> None:
    """Do every job, and save what they return."""
    torch.set_num_threads(1)
    if world:
        init_process_group(rank, world, master_addr="127.0.0.1", master_port=port, timeout_s=300)
    try:
        done = {}
        played = (1, 2, 4) if sp == 1 else (1, 2)
        for ranks in (world // sp,) if world else played:
            place = Place(rank, world, ranks, sp)
            jobs = [job for job, worlds in JOBS.items() if ranks in worlds] if sp == 1 else SHARED
            done[ranks] = {job.__name__: job(place) for job in jobs}
            if world and sp > 1:
                done[ranks]["attention"] = attention(place)
            traced(place, folder / f"trace{world}_{ranks}")
            if world or ranks == 1:
                done[ranks] |= {"resumed": resumed(place, folder), "refused": refused(place, folder)}
        torch.save(done, folder / f"done{world}_{rank}.pt")
    except BaseException:
        (folder / f"failed{world}_{rank}.txt").write_text(traceback.format_exc())
        raise
    finally:
        destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
