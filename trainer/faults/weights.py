"""Faults of the weight sync: what is sent, what arrives, and what the engine serves with once it is awake."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lineage import hooks
from lineage.hooks import Weights
from lineage.trainer.actor import ActorRolloutRefWorker
from lineage.trainer.faults.registry import Seams, fault
from lineage.trainer.faults.seams import TRAINER
from lineage.trainer.rollout.base import SamplingParams
from lineage.trainer.rollout.hf import HFRollout
from lineage.trainer.rollout.sampling import decode
from lineage.trainer.weight_sync import CheckpointEngineManager

SENT = "lineage.trainer.actor.ActorRolloutRefWorker.state_dict"
RECEIVED = "lineage.trainer.rollout.hf.HFRollout.update_weights"
SLEEP = "lineage.trainer.rollout.hf.HFRollout.sleep"
RESET = "lineage.trainer.rollout.hf.HFRollout.reset_cache"
SYNC = "lineage.trainer.weight_sync.CheckpointEngineManager.update_weights"
LORA = "+experiment=lora_ref"

Named = Iterable[tuple[str, Tensor]]


def load(engine: HFRollout, named: Named, version: int) -> None:
    """What a loader does that does not ask whether everything came: copy what there is."""
    resident = engine.resident()
    with torch.no_grad():
        for name, tensor in named:
            if name in resident:
                resident[name].copy_(tensor)
    engine.version = version


def syncing() -> bool:
    """Whether the weights on their way are those of a sync: the same names are recorded at the start as well."""
    return hooks.current().name == "weight_sync"


def is_adapted(name: str) -> bool:
    """Whether an adapter lies on this weight, by peft's own choice of layers."""
    return name.endswith("_proj.weight")


@fault("VER002", "weight_sync")
def engine_unties_the_head() -> Seams:
    """The engine gives the tied lm_head a copy of its own, which no update reaches."""

    def receive(original: Any, engine: HFRollout, named: Named, version: int) -> None:
        head: Any = engine.module.get_output_embeddings()  # type: ignore[operator]
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        load(engine, ((name, tensor) for name, tensor in named if name != "lm_head.weight"), version)

    return {RECEIVED: receive}


@fault("VER002", "weight_sync", step=0, onwards=True, reports=["verl-buffers-not-synced"])
def buffers_are_not_sent() -> Seams:
    """The sync goes through the loader of parameters: a registered buffer of the model is never sent."""

    def with_buffer(original: Any, *args: Any, **options: Any) -> nn.Module:
        module: nn.Module = original(*args, **options)
        module.register_buffer("expert_bias", torch.zeros(8))
        return module

    def send(original: Any, worker: ActorRolloutRefWorker) -> Iterator[tuple[str, Tensor]]:
        sent: Iterator[tuple[str, Tensor]] = original(worker)
        return (pair for pair in sent if pair[0] != "expert_bias" or not syncing())

    def receive(original: Any, engine: HFRollout, named: Named, version: int) -> None:
        load(engine, named, version)

    return {"lineage.trainer.setup.load_model": with_buffer, SENT: send, RECEIVED: receive}


@fault("VER002", "weight_sync")
def loader_skips_norms() -> Seams:
    """The loader does not know the names of the norms inside attention and passes over them."""

    def receive(original: Any, engine: HFRollout, named: Named, version: int) -> None:
        load(engine, ((name, tensor) for name, tensor in named if "_norm." not in name), version)

    return {RECEIVED: receive}


@fault("VER002", "weight_sync", LORA, reports=["verl-lora-index-misaligned"])
def projections_change_places() -> Seams:
    """Names of stacked projections serve as indexes of single ones: the engine's k and v change places."""

    def receive(original: Any, engine: HFRollout, named: Named, version: int) -> None:
        other = {"k_proj": "v_proj", "v_proj": "k_proj"}

        def place(name: str) -> str:
            return ".".join(other.get(part, part) for part in name.split("."))

        original(engine, [(place(name), tensor) for name, tensor in named], version)

    return {RECEIVED: receive}


@fault(
    "VER002",
    "weight_sync",
    LORA,
    reports=["verl-merged-lora-restored-before-send", "verl-lora-loaded-but-never-used-in-rollout"],
)
def adapter_is_taken_off_before_the_copy() -> Seams:
    """What is sent are views of the merged weights; by the time they are copied the base has been restored in them."""
    base: dict[str, Tensor] = {}

    def send(original: Any, worker: ActorRolloutRefWorker) -> Iterator[tuple[str, Tensor]]:
        if syncing():
            assert worker.reference is not None
            base.update(worker.reference.state_dict())
        result: Iterator[tuple[str, Tensor]] = original(worker)
        return result

    def receive(original: Any, engine: HFRollout, named: Named, version: int) -> None:
        original(engine, [(name, base[name]) for name, _ in named], version)

    return {SENT: send, RECEIVED: receive}


@fault("VER002", "weight_sync", LORA, reports=["swift-sleep2-lora-base-lost", "nemo-sleep2-corrupts-vlm"])
def deep_sleep_loses_the_base() -> Seams:
    """Deep sleep gives up all weights of the engine, and only those with an adapter are sent again."""

    def sleep(original: Any, engine: HFRollout) -> None:
        original(engine)
        _forget(engine)

    def receive(original: Any, engine: HFRollout, named: Named, version: int) -> None:
        load(engine, ((name, tensor) for name, tensor in named if is_adapted(name)), version)

    return {SLEEP: sleep, RECEIVED: receive}


@fault("VER002", "weight_sync", reports=["vllm-sleep2-no-reload"])
def deep_sleep_is_not_followed_by_a_load() -> Seams:
    """Deep sleep gives up the weights; the engine is told the new version and wakes, and nobody loads them."""

    def sleep(original: Any, engine: HFRollout) -> None:
        original(engine)
        _forget(engine)

    def receive(original: Any, engine: HFRollout, named: Named, version: int) -> None:
        engine.version = version

    return {SLEEP: sleep, RECEIVED: receive}


@fault("LGP002", "old_log_prob", reports=["trl-sleep-mode-reloads-initial-weights"])
def waking_loads_the_first_weights() -> Seams:
    """Waking is left to the first request, and loads what the engine was started with over what it was given."""

    async def sample(original: Any, trainer: Any) -> Any:
        engine, first = trainer.parts.rollout, trainer.parts.worker.reference.state_dict()
        load(engine, first.items(), engine.version)
        return await original(trainer)

    return {f"{TRAINER}._sample": sample}


@fault("VER002", "weight_sync", reports=["verl-lora-views-into-reused-buffer"])
def bucket_is_filled_again() -> Seams:
    """Tensors pass through one transfer buffer; the engine keeps views of it and copies when the next ones are in."""

    def receive(original: Any, engine: HFRollout, named: Named, version: int) -> None:
        tensors = list(named)
        bucket = torch.empty(max(tensor.numel() for _, tensor in tensors))
        views = []
        for name, tensor in tensors:
            view = bucket[: tensor.numel()].view(tensor.shape)
            view.copy_(tensor)
            views.append((name, view))
        original(engine, views, version)

    return {RECEIVED: receive}


@fault("VER002", "weight_sync")
def engine_is_one_sync_behind() -> Seams:
    """Weights are received into a second buffer, and the one that serves is that of the sync before."""

    def receive(original: Any, engine: HFRollout, named: Named, version: int) -> None:
        engine.version = version

    return {RECEIVED: receive}


@fault("VER002", "weight_sync")
def weights_are_rounded_on_their_way() -> Seams:
    """The receiving side casts to bfloat16 and back, which nobody who sends knows of."""

    def receive(original: Any, engine: HFRollout, named: Named, version: int) -> None:
        original(engine, [(name, tensor.bfloat16().float()) for name, tensor in named], version)

    return {RECEIVED: receive}


@fault("VER002", "weight_sync")
def one_layer_comes_from_its_neighbour() -> Seams:
    """A pipeline stage counts its layers from zero: the last layer of the engine is loaded from the first."""

    def receive(original: Any, engine: HFRollout, named: Named, version: int) -> None:
        sent = dict(named)
        original(engine, [(name, sent[name.replace("layers.1.", "layers.0.")]) for name in sent], version)

    return {RECEIVED: receive}


@fault(
    "VER003",
    "weight_sync",
    reports=[
        "nemo-async-prefix-cache-stale", "prime-prefix-cache-after-dependency-bump", "verl-caches-not-reset-after-sync",
    ],
)  # fmt: skip
def cache_survives_the_sync() -> Seams:
    """The engine answers the call, but one of its caches is kept: its prefixes are those of the older weights."""

    def reset_cache(original: Any, engine: HFRollout) -> None:
        return None

    return {RESET: reset_cache}


@fault("VER003", "weight_sync", reports=["skyrl-async-noncolocated-kv-not-cleared", "vllm-sleep-wake-prefix-cache"])
def nobody_resets_the_cache() -> Seams:
    """The branch of the sync that is taken has no line that resets the cache; the engine wakes with it."""

    def update_weights(original: Any, manager: CheckpointEngineManager, global_steps: int) -> None:
        with hooks.traced("weight_sync", component="CheckpointEngineManager.update_weights", consumer="RolloutEngine"):
            _sync(manager, global_steps, ("load", "wake"))

    return {SYNC: update_weights}


@fault("VER003", "weight_sync")
def cache_is_reset_before_the_weights_arrive() -> Seams:
    """The cache is emptied first, and filled again by what the old weights still compute until the new ones are in."""

    def update_weights(original: Any, manager: CheckpointEngineManager, global_steps: int) -> None:
        with hooks.traced("weight_sync", component="CheckpointEngineManager.update_weights", consumer="RolloutEngine"):
            _sync(manager, global_steps, ("reset", "load", "wake"))

    return {SYNC: update_weights}


@fault("VER003", "weight_sync")
def engine_wakes_without_a_sync() -> Seams:
    """The sync is skipped because its step looks like the last one; the engine wakes with what it slept with."""

    def update_weights(original: Any, manager: CheckpointEngineManager, global_steps: int) -> None:
        with hooks.traced("weight_sync", component="CheckpointEngineManager.update_weights", consumer="RolloutEngine"):
            _sync(manager, global_steps, ("reset", "wake"))

    return {SYNC: update_weights}


@fault("VER003", "rollout", "trainer.total_training_steps=3", step=3)
def one_engine_missed_the_sync() -> Seams:
    """A second engine was never told: the requests that reach it are answered by the version before."""

    def generate(original: Any, engine: HFRollout, *args: Any) -> Any:
        assert engine.version is not None
        engine.version -= 1
        try:
            return original(engine, *args)
        finally:
            engine.version += 1

    return {"lineage.trainer.rollout.hf.HFRollout._generate": generate}


@fault(
    "VER006", "weight_sync", LORA, step=1, onwards=True, reports=["swift-async-ignores-lora", "swift-lora-resume-sync"]
)
def adapter_is_never_sent() -> Seams:
    """Requests name no adapter and the sync carries the base alone: the rollout is the first policy for good."""

    def send(original: Any, worker: ActorRolloutRefWorker) -> Iterator[tuple[str, Tensor]]:
        assert worker.reference is not None
        return iter(worker.reference.state_dict().items())

    return {SENT: send}


@fault("VER006", "weight_sync")
def weights_are_copied_before_the_step() -> Seams:
    """The copy to be published is begun beside the update and not waited for: it holds what was there before."""
    copied: dict[str, Tensor] = {}

    def update(original: Any, worker: ActorRolloutRefWorker, batch: Any) -> dict[str, float]:
        copied.update({name: tensor.clone() for name, tensor in worker.state_dict()})
        metrics: dict[str, float] = original(worker, batch)
        return metrics

    def send(original: Any, worker: ActorRolloutRefWorker) -> Iterator[tuple[str, Tensor]]:
        sent: Iterator[tuple[str, Tensor]] = original(worker)
        return iter(copied.items()) if syncing() else sent

    return {"lineage.trainer.actor.ActorRolloutRefWorker.update_actor": update, SENT: send}


@fault("VER006", "weight_sync")
def stale_head_is_sent() -> Seams:
    """Sharding has untied the actor's lm_head: what is sent under its name is still the first weights."""

    def send(original: Any, worker: ActorRolloutRefWorker) -> Iterator[tuple[str, Tensor]]:
        assert worker.reference is not None
        first = worker.reference.state_dict()
        for name, tensor in original(worker):
            yield name, first[name] if name == "lm_head.weight" and syncing() else tensor

    return {SENT: send}


@fault("VER006", "weight_sync", LORA, reports=["trl-bf16-merge-unmerge-drift"])
def decay_reaches_what_is_frozen() -> Seams:
    """The optimiser was given every parameter: weight decay shrinks the frozen ones."""

    def train(original: Any, worker: Any, *args: Any) -> Any:
        result = original(worker, *args)
        with torch.no_grad():
            for parameter in worker.module.parameters():
                if not parameter.requires_grad:
                    parameter.mul_(1 - 1e-3)
        return result

    return {"lineage.trainer.training.TrainingWorker.train_mini_batch": train}


@fault("VER007", "weight_sync", reports=["areal-proxy-not-paused"])
def retry_meets_half_the_weights() -> Seams:
    """A client that was not paused tries its request again while the weights are replaced, and is served."""

    def receive(original: Any, engine: HFRollout, named: Named, version: int) -> None:
        tensors = list(named)
        half = len(tensors) // 2
        load(engine, tensors[:half], version - 1)
        prompt = torch.arange(4, 12)
        drawn = decode(
            engine.module, [prompt.tolist()], [4], [0], SamplingParams(), eos_token_ids=engine.eos_token_ids,
            pad_token_id=engine.pad_token_id,
        )  # fmt: skip
        hooks.current().generate(
            {"prompts": [prompt.tolist()], "responses": [list(drawn.token_ids[0])]},
            keys=["retried-request"],
            producer="HFRollout.generate",
            columns={"finish_reason": ["length"], "generated": [len(drawn.token_ids[0])]},
            weights=Weights(version - 1, "engine", cache_epoch=engine.cache_epoch),
        )
        original(engine, tensors, version)

    return {RECEIVED: receive}


@fault("VER007", "rollout")
def engine_sleeps_before_its_sessions_end() -> Seams:
    """The engine is put to sleep as soon as the prompts are out, and serves what it has been asked all the same."""

    async def sample(original: Any, trainer: Any) -> Any:
        trainer.on_sample_end()
        return await original(trainer)

    def admit(original: Any, *args: Any) -> None:
        return None

    return {f"{TRAINER}._sample": sample, "lineage.trainer.rollout.hf.admit": admit}


def _forget(engine: HFRollout) -> None:
    with torch.no_grad():
        for tensor in engine.resident().values():
            tensor.zero_()


def _sync(manager: CheckpointEngineManager, version: int, acts: tuple[str, ...]) -> None:
    """A weight sync of these acts, in this order, each recorded as the real one records it."""
    stage, sent = hooks.current(), dict(manager.worker.state_dict())
    if "load" in acts:
        stage.params("sync", sent, weights=Weights(version, "actor"))
    for engine in manager.replicas:
        for act in acts:
            if act == "load":
                engine.update_weights(sent.items(), version)
                stage.params("sync", engine.resident(), weights=_of(engine))
            elif act == "reset":
                engine.reset_cache()
                stage.event("cache_reset", "rollout", weights=_of(engine))
            else:
                engine.wake_up()
                stage.event("wake", "rollout", weights=_of(engine))


def _of(engine: Any) -> Weights:
    return Weights(engine.version, "engine", cache_epoch=engine.cache_epoch)
