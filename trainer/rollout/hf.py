"""The transformers rollout engine: one copy of the model, requests of one loop pass generated together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lineage import hooks
from lineage.hooks import Weights
from lineage.trainer.protocol import nested_from_list
from lineage.trainer.rollout.base import RolloutError, SamplingParams, TokenOutput, admit
from lineage.trainer.rollout.sampling import Drawn, decode


@dataclass
class _Request:
    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int
    answer: asyncio.Future[TokenOutput]


class HFRollout:
    """Generation by a transformers model that is the engine's own copy.

    Concurrent requests are collected until the event loop comes round once, then decoded as one batch in the order they
    arrived. The engine starts asleep and without a version: it serves after the first weight sync.

    Args:
        module: a causal language model of its own; it is put in eval mode and frozen.
        eos_token_ids: ids that end a row.
        pad_token_id: fills prompts on the left.
        max_num_seqs: most rows decoded together.
    """

    def __init__(
        self, module: nn.Module, *, eos_token_ids: Sequence[int], pad_token_id: int, max_num_seqs: int = 256
    ) -> None:
        self.module = module.eval().requires_grad_(False)
        self.eos_token_ids = list(eos_token_ids)
        self.pad_token_id = pad_token_id
        self.max_num_seqs = max_num_seqs
        self.version: int | None = None
        self.cache_epoch = 0
        self.asleep = True
        self._waiting: list[_Request] = []

    async def generate(
        self, request_id: str, *, prompt_ids: Sequence[int], sampling_params: SamplingParams, max_tokens: int, seed: int
    ) -> TokenOutput:
        """Continue ``prompt_ids`` by at most ``max_tokens`` tokens.

        Raises:
            RolloutError: the engine sleeps, has no weights yet, or the request is empty.
        """
        admit(self, request_id, prompt_ids, max_tokens)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[TokenOutput] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._flush)
        self._waiting.append(_Request(request_id, list(prompt_ids), sampling_params, max_tokens, seed, answer))
        return await answer

    def sleep(self) -> None:
        """Refuse requests until :meth:`wake_up`. The KV cache lives for one batch only, so there is none to drop."""
        if self._waiting:
            raise RolloutError(f"the rollout cannot sleep: {len(self._waiting)} requests wait to be generated")
        self.asleep = True

    def wake_up(self) -> None:
        """Take requests again."""
        self.asleep = False

    def reset_cache(self) -> None:
        """Begin a new cache epoch: nothing computed with older weights is used again."""
        self.cache_epoch += 1

    @torch.no_grad()
    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy tensors by name into the engine's module.

        Raises:
            RolloutError: a name the module lacks, another shape, or a tensor of the module that was not sent.
        """
        mine = self.resident()
        missing = set(mine)
        for name, tensor in named_tensors:
            if name not in mine or mine[name].shape != tensor.shape:
                here = list(mine[name].shape) if name in mine else "no such tensor"
                raise RolloutError(f"weight sync: {name} {list(tensor.shape)} does not fit the rollout ({here})")
            mine[name].copy_(tensor)
            missing.discard(name)
        if missing:
            raise RolloutError(f"weight sync: {len(missing)} tensors were not sent, first {min(missing)}")
        self.version = version

    def resident(self) -> dict[str, Tensor]:
        """The module's own tensors by state-dict name (views, not copies)."""
        return dict(self.module.state_dict())

    @torch.no_grad()
    def score(self, token_ids: Sequence[int]) -> Tensor:
        """Log-probs ``(len(token_ids) - 1,)`` of each token after the first, at temperature 1; asleep or not."""
        ids = torch.tensor([list(token_ids)], device=next(self.module.parameters()).device)
        log_probs = self.module(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(dim=-1)
        return log_probs.gather(-1, ids[0, 1:].unsqueeze(-1)).squeeze(-1).cpu()

    def close(self) -> None:
        """The module goes with the process."""

    def _flush(self) -> None:
        """Generate everything somebody awaits: one batch for each way of sampling, in order of arrival."""
        waiting, self._waiting = self._waiting, []
        batches: dict[SamplingParams, list[_Request]] = {}
        for request in waiting:
            if not request.answer.done():  # a cancelled session no longer waits
                batches.setdefault(request.params, []).append(request)
        for params, requests in batches.items():
            for start in range(0, len(requests), self.max_num_seqs):
                self._answer(requests[start : start + self.max_num_seqs], params)

    def _answer(self, requests: list[_Request], params: SamplingParams) -> None:
        try:
            outputs = self._generate(requests, params)
        except Exception as error:  # whoever awaits the request gets it; the engine lives on
            for request in requests:
                request.answer.set_exception(error)
            return
        for request, output in zip(requests, outputs, strict=True):
            request.answer.set_result(output)

    def _generate(self, requests: list[_Request], params: SamplingParams) -> list[TokenOutput]:
        drawn = decode(
            self.module,
            [request.prompt_ids for request in requests],
            [request.max_tokens for request in requests],
            [request.seed for request in requests],
            params,
            eos_token_ids=self.eos_token_ids,
            pad_token_id=self.pad_token_id,
            watched=hooks.recorder().tracing and params.narrowed,
        )
        outputs = [
            TokenOutput(ids, scores, "stop" if ended else "length", len(ids), {"global_steps": self.version})
            for ids, scores, ended in zip(drawn.token_ids, drawn.log_probs, drawn.finished, strict=True)
        ]
        self._record(requests, outputs, params, drawn)
        return outputs

    def _record(
        self, requests: list[_Request], outputs: list[TokenOutput], params: SamplingParams, drawn: Drawn
    ) -> None:
        if not hooks.recorder().enabled:
            return
        assert self.version is not None  # `admit` refused the request otherwise
        watched = {"likelier": drawn.likelier, "likelier_mass": drawn.likelier_mass if params.top_p < 1.0 else None}
        hooks.current().generate(
            {
                "prompts": nested_from_list([torch.tensor(request.prompt_ids) for request in requests]),
                "responses": nested_from_list([torch.tensor(output.token_ids) for output in outputs]),
                **{
                    name: nested_from_list([torch.tensor(row) for row in rows])
                    for name, rows in watched.items()
                    if rows is not None
                },
            },
            keys=[request.request_id for request in requests],
            entity="request",
            producer="HFRollout.generate",
            columns={
                "finish_reason": [output.stop_reason for output in outputs],
                "generated": [output.generated for output in outputs],
            },
            weights=Weights(self.version, "engine", cache_epoch=self.cache_epoch, training=self.module.training),
            sampling=params.recorded,
        )
