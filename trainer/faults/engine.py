"""Faults of the real rollout engine, in a process of its own (``mode=ray rollout.name=vllm``).

What exists in the reference engine as well (a load that skips names, a cache nobody resets) is with the weights; these
are of what only a real one has: packed copies of weights, a cache of prefixes, sampling and a queue of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import replace
from typing import Any

from lineage import hooks
from lineage.trainer.faults.registry import Seams, fault
from lineage.trainer.faults.seams import tiny_tokenizer

VLLM = ("mode=ray", "trainer.n_gpus_per_node=2", "rollout.name=vllm")
#: every prompt begins with the same 160 tokens: vLLM's cache on a CPU knows whole blocks of 128
PREAMBLE = "{{ 'o' * 160 }}{% for message in messages %}{{ message.content }}{% endfor %}"
LONG = (*VLLM, "data.max_prompt_length=256", f'+data.apply_chat_template_kwargs.chat_template="{PREAMBLE}"')
ENGINE = "lineage.trainer.rollout.vllm.VLLMRollout"
WORKER = "lineage.trainer.rollout.vllm_worker"
PROCESS = "lineage.trainer.ray.rollout"


@fault("VER002", "weight_sync", *VLLM, step=1, onwards=True)
def stale_tied_head() -> Seams:
    """A reload writes the tied weight and leaves the output layer's packed copy, which keeps the first weights."""

    def repack(original: Any, model: Any) -> list[str]:
        return []

    return {f"{WORKER}.repack_tied": repack}


@fault("VER002", "weight_sync", *VLLM, step=1, onwards=True)
def load_is_acknowledged_only() -> Seams:
    """The engine's worker answers the load and loads nothing; the engine serves under the new version."""

    def load(original: Any, worker: Any, named_tensors: Any) -> None:
        return None

    return {f"{WORKER}.WorkerExtension.lineage_load": load}


@fault("VER003", "weight_sync", *VLLM, step=1, onwards=True)
def skipped_sync() -> Seams:
    """The sync never reaches the engine: its cache begins anew, and it wakes with what it slept with."""

    def receive(original: Any, engine: Any, *rest: Any, **options: Any) -> None:
        stage = hooks.current()
        for act, op in ((engine.reset_cache, "cache_reset"), (engine.wake_up, "wake")):
            act()
            weights = hooks.Weights(engine.version, "engine", cache_epoch=engine.cache_epoch)
            stage.event(op, "rollout", weights=weights)

    return {f"{PROCESS}.receive": receive}


@fault("LGP002", "old_log_prob", *LONG, "actor_rollout_ref.actor.optim.lr=0.01", step=1, shows=2)
def stale_prefix_cache() -> Seams:
    """The engine counts a new cache epoch and forgets nothing: prompts go on from what older weights computed."""

    def reset(original: Any, engine: Any) -> None:
        engine.cache_epoch += 1

    return {f"{ENGINE}.reset_cache": reset}


@fault("LGP002", "old_log_prob", *VLLM, "rollout.temperature=0.7")
def engine_ignores_the_temperature() -> Seams:
    """The engine draws at temperature 1 whatever it is asked for."""

    return {f"{ENGINE}._sampling": _asked_with(lambda params: replace(params, temperature=1.0))}


@fault("LGP002", "old_log_prob", *VLLM)
def engine_has_a_top_p_of_its_own() -> Seams:
    """A default of the model's files cuts the engine's sampling to a top_p, and its log-probs are of what is left."""

    return {f"{ENGINE}._sampling": _asked_with(lambda params: replace(params, top_p=0.9))}


def _asked_with(change: Callable[[Any], Any]) -> Callable[..., Any]:
    def sampling(original: Any, engine: Any, params: Any, *rest: Any) -> Any:
        return original(engine, change(params), *rest)

    return sampling


@fault("TOK002", "rollout", *VLLM)
def engine_retokenizes_the_prompt() -> Seams:
    """The prompt goes to the engine as text, and the tokens it makes of that are not those it was made of."""

    async def generate(original: Any, engine: Any, request_id: str, *, prompt_ids: Any, **options: Any) -> Any:
        tokenizer = tiny_tokenizer()
        text = tokenizer.decode(prompt_ids, skip_special_tokens=True)
        again = tokenizer.encode(text, add_special_tokens=False)
        return await original(engine, request_id, prompt_ids=again, **options)

    return {f"{ENGINE}.generate": generate}


@fault("VER007", "rollout", *VLLM)
def request_is_admitted_asleep() -> Seams:
    """The last request of the step is sent again by a client that nobody told to wait, and the engine serves it."""
    last: list[tuple[tuple[Any, ...], dict[str, Any], Context]] = []
    running: set[asyncio.Task[Any]] = set()

    async def generate(original: Any, *args: Any, **options: Any) -> Any:
        last[:] = [(args, options, copy_context())]
        return await original(*args, **options)

    def admit(original: Any, *args: Any) -> None:
        return None

    def sleep(original: Any, engine: Any) -> None:
        original(engine)
        ((args, options, context),) = last
        again = type(engine).generate(*args, **options)
        task = asyncio.get_running_loop().create_task(again, context=context)
        running.add(task)
        task.add_done_callback(running.discard)

    return {f"{ENGINE}.generate": generate, f"{ENGINE}._admit": admit, f"{PROCESS}.sleep": sleep}


@fault("VER001", "rollout", *VLLM)
def output_has_the_version_before() -> Seams:
    """Outputs are stamped with the version the engine served before its last load."""

    def output(original: Any, engine: Any, finished: Any) -> Any:
        made = original(engine, finished)
        return replace(made, extra_fields={"global_steps": engine.version - 1})

    return {f"{ENGINE}._output": output}
