"""The transformers engine: batches of concurrent requests, versions, sleep and wake."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch

from lineage.trainer.models import load_model
from lineage.trainer.rollout import hf
from lineage.trainer.rollout.base import RolloutError, SamplingParams
from lineage.trainer.rollout.hf import HFRollout
from lineage.trainer.setup import use_few_threads


@pytest.fixture
def model(tiny):
    """A fresh tiny model."""
    model = load_model(tiny)
    use_few_threads(model)
    return model


@pytest.fixture
def rollout(model):
    """An engine that has the model's weights as version 0 and is awake."""
    engine = HFRollout(copy.deepcopy(model), eos_token_ids=[3], pad_token_id=0)
    engine.update_weights(model.state_dict().items(), 0)
    engine.wake_up()
    return engine


async def ask(engine, count, **params):
    """Concurrent requests, one a session."""
    requests = [
        engine.generate(
            f"u_{place}_0",
            prompt_ids=[7] * (place + 1),
            sampling_params=SamplingParams(**params),
            max_tokens=5,
            seed=place,
        )
        for place in range(count)
    ]
    return await asyncio.gather(*requests)


def test_requests_of_one_pass_are_one_batch(rollout, monkeypatch):
    """Concurrent requests are decoded together, in batches of max_num_seqs, and answered each with its own tokens."""
    sizes = []
    real = hf.decode
    monkeypatch.setattr(
        hf,
        "decode",
        lambda module, prompts, *rest, **kw: sizes.append(len(prompts)) or real(module, prompts, *rest, **kw),
    )
    whole = asyncio.run(ask(rollout, 5))
    rollout.max_num_seqs = 2
    parts = asyncio.run(ask(rollout, 5))
    assert sizes == [5, 2, 2, 1]
    assert [output.token_ids for output in whole] == [output.token_ids for output in parts]
    assert all(output.generated == len(output.token_ids) == len(output.log_probs) for output in whole)


def test_outputs_carry_the_version_that_made_them(rollout, model):
    """The answer names the weights' version, and new weights change the answer."""
    before = asyncio.run(ask(rollout, 1))[0]
    with torch.no_grad():
        model.lm_head.weight.neg_()
    rollout.update_weights(model.state_dict().items(), 4)
    after = asyncio.run(ask(rollout, 1))[0]
    assert (before.extra_fields["global_steps"], after.extra_fields["global_steps"]) == (0, 4)
    assert before.token_ids != after.token_ids


def test_the_engine_shares_no_memory_with_the_actor(rollout, model):
    """Training the actor does not move the engine's weights until they are synced."""
    mine = {name: tensor.clone() for name, tensor in rollout.resident().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(tensor, mine[name]) for name, tensor in rollout.resident().items())


@pytest.mark.parametrize("state", ["asleep", "without weights"])
def test_no_request_is_admitted_out_of_order(rollout, state):
    """A sleeping engine, or one without weights, refuses and says why."""
    if state == "asleep":
        rollout.sleep()
    else:
        rollout.version = None
    with pytest.raises(RolloutError, match="sleeps" if state == "asleep" else "no weights"):
        asyncio.run(ask(rollout, 1))


def test_empty_requests_are_refused(rollout):
    """No prompt, or no room to answer, is an error of the caller."""
    for prompt_ids, room in (([], 5), ([1], 0)):
        call = rollout.generate("r", prompt_ids=prompt_ids, sampling_params=SamplingParams(), max_tokens=room, seed=0)
        with pytest.raises(RolloutError, match="nothing to generate"):
            asyncio.run(call)


def test_weights_must_fit(rollout, model):
    """A missing tensor or another shape is named."""
    tensors = dict(model.state_dict())
    name = next(iter(tensors))
    with pytest.raises(RolloutError, match="does not fit"):
        rollout.update_weights([(name, torch.zeros(1))], 1)
    del tensors[name]
    with pytest.raises(RolloutError, match="1 tensors were not sent"):
        rollout.update_weights(tensors.items(), 1)


def test_an_error_reaches_every_waiting_request(rollout, monkeypatch):
    """When decoding fails all its requests get the error, and the engine serves the next ones."""

    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(hf, "decode", fail)

        async def both():
            return await asyncio.gather(ask(rollout, 1), ask(rollout, 2), return_exceptions=True)

        assert [str(error) for error in asyncio.run(both())] == ["out of memory"] * 2
    assert len(asyncio.run(ask(rollout, 2))) == 2


def test_a_request_nobody_awaits_is_not_generated(rollout, monkeypatch):
    """Cancelled before the engine begins, it costs nothing; the others of its batch are answered as if alone."""
    decoded = []
    real = hf.decode
    monkeypatch.setattr(
        hf, "decode", lambda module, prompts, *rest, **kw: decoded.append(prompts) or real(module, prompts, *rest, **kw)
    )

    async def go(cancelled):
        tasks = [asyncio.create_task(ask(rollout, count)) for count in (1, 2)]
        await asyncio.sleep(0)  # they ask
        await asyncio.sleep(0)
        for task in tasks[:cancelled]:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    one, two = asyncio.run(go(cancelled=1))
    assert isinstance(one, asyncio.CancelledError)
    assert decoded == [[[7], [7, 7]]]
    assert [output.token_ids for output in two] == [output.token_ids for output in asyncio.run(ask(rollout, 2))]
    decoded.clear()
    asyncio.run(go(cancelled=2))
    assert decoded == []


def test_cache_epochs_count_resets(rollout):
    """Every reset begins a new epoch."""
    rollout.reset_cache()
    rollout.reset_cache()
    assert rollout.cache_epoch == 2
