"""The vLLM engine itself, in this process: sampling, weights by name, its cache, and what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pyarrow.parquet as pq
import pytest
import torch

from lineage import hooks
from lineage.hooks import UserError, traced
from lineage.trainer.models import find_model, load_model
from lineage.trainer.rollout import vllm_worker
from lineage.trainer.rollout.base import RolloutError, SamplingParams
from lineage.trainer.rollout.hf import HFRollout

pytest.importorskip("vllm")
from lineage.trainer.rollout.vllm import VLLMRollout

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

BLOCK = 128  # tokens of vLLM's cache on a CPU: no shorter prompt is ever found there
END = 3


@pytest.fixture(scope="module")
def engine() -> Iterator[VLLMRollout]:
    """The engine over the tied tiny model; what it does to its process is undone."""
    threads, disabled = torch.set_num_threads, torch._dynamo.config.disable
    made = VLLMRollout(find_model("tiny_tied").folder, eos_token_ids=[END], max_model_len=512, max_num_seqs=16)
    yield made
    made.close()
    torch.set_num_threads, torch._dynamo.config.disable = threads, disabled


@pytest.fixture
def model() -> torch.nn.Module:
    """The actor's model, as it was loaded."""
    return load_model(find_model("tiny_tied"))


@pytest.fixture
def rollout(engine: VLLMRollout, model: torch.nn.Module) -> VLLMRollout:
    """The engine with the model's weights as version 0, awake, its cache empty."""
    sync(engine, model, 0)
    return engine


def sync(engine: VLLMRollout, model: torch.nn.Module, version: int) -> None:
    engine.sleep()
    engine.update_weights(model.state_dict().items(), version)
    engine.reset_cache()
    engine.wake_up()


def change(model: torch.nn.Module, seed: int = 1) -> None:
    """Move every weight; the tied ones stay tied."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))


def prompts(count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(4, 90, (length + place,), generator=generator).tolist() for place in range(count)]


def ask(engine, asked, max_tokens=12, **params):
    """Concurrent requests, each with a seed of its own."""

    async def all_of_them():
        return await asyncio.gather(
            *(
                engine.generate(
                    f"u_{place}_0",
                    prompt_ids=prompt,
                    sampling_params=SamplingParams(**params),
                    max_tokens=max_tokens,
                    seed=place,
                )
                for place, prompt in enumerate(asked)
            )
        )

    return asyncio.run(all_of_them())


@torch.no_grad()
def gap(model, asked, outputs, temperature=1.0) -> float:
    """The greatest difference between the sampler's log-probs and the model's own."""
    worst = 0.0
    for prompt, output in zip(asked, outputs, strict=True):
        ids = torch.tensor([prompt + output.token_ids])
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float() / temperature
        own = logits.log_softmax(-1).gather(-1, torch.tensor(output.token_ids)[:, None]).squeeze(-1)
        worst = max(worst, float((own - torch.tensor(output.log_probs)).abs().max()))
    return worst


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_log_probs_are_the_models(rollout, model, temperature):
    """After the temperature, as the actor recomputes them, before and after a sync that moves every weight."""
    asked = prompts(6, BLOCK + 10)
    assert gap(model, asked, ask(rollout, asked, temperature=temperature), temperature) < 1e-3
    change(model)
    sync(rollout, model, 1)
    outputs = ask(rollout, asked, temperature=temperature)
    assert gap(model, asked, outputs, temperature) < 1e-3
    assert {output.extra_fields["global_steps"] for output in outputs} == {1}


def test_a_seed_draws_the_same_tokens_whoever_shares_the_step(rollout):
    """Alone or together, and once more: the same tokens, and the same log-probs to the last bit."""
    asked = prompts(5, 20)
    together = ask(rollout, asked)
    (alone,) = ask(rollout, asked[:1])
    assert alone == together[0]
    assert ask(rollout, asked) == together
    assert len({tuple(output.token_ids) for output in together}) == 5


def test_rows_end_by_length_or_by_an_end_token(rollout):
    """The end token is part of the row; told to ignore it, a row goes on to its limit."""
    rollout.eos_token_ids = list(range(60))
    try:
        stopped = ask(rollout, prompts(4, 20), max_tokens=60)
        assert {output.stop_reason for output in stopped} == {"stop"}
        assert all(output.token_ids[-1] < 60 <= min(output.token_ids[:-1], default=60) for output in stopped)
        assert [output.generated for output in stopped] == [len(output.log_probs) for output in stopped]
        on = ask(rollout, prompts(4, 20), max_tokens=60, ignore_eos=True)
    finally:
        rollout.eos_token_ids = [END]
    assert {(output.stop_reason, output.generated) for output in on} == {("length", 60)}


def test_a_sync_delivers_every_tensor_exactly(rollout, model):
    """What each layer computes with is what was sent, fused, packed and tied ones included."""
    for seed in (1, 2):
        change(model, seed)
        sync(rollout, model, seed)
        sent, there = model.state_dict(), rollout.resident()
        assert there.keys() == sent.keys()
        assert [name for name in sent if not torch.equal(sent[name], there[name])] == []
    assert "lm_head.weight" in there


def test_without_the_repair_the_tied_head_stays_behind(rollout, model, monkeypatch):
    """vLLM's own reload leaves the packed copy of a tied output layer as it was, and only there it shows."""
    monkeypatch.setattr(vllm_worker, "repack_tied", lambda model: [])
    change(model)
    sync(rollout, model, 1)
    sent, there = model.state_dict(), rollout.resident()
    assert [name for name in sent if not torch.equal(sent[name], there[name])] == ["lm_head.weight"]
    asked = prompts(4, 20)
    assert gap(model, asked, ask(rollout, asked)) > 1e-2


def test_a_stale_prefix_is_gone_after_the_reset(rollout, model):
    """Prompts longer than a block come from the cache, with the weights of before, until it is reset."""
    asked = prompts(4, BLOCK + 30)
    ask(rollout, asked)
    change(model)
    rollout.update_weights(model.state_dict().items(), 1)
    assert gap(model, asked, ask(rollout, asked)) > 1e-2
    before = rollout.cache_epoch
    rollout.reset_cache()
    assert rollout.cache_epoch == before + 1
    assert gap(model, asked, ask(rollout, asked)) < 1e-3


def test_a_scored_prompt_has_the_models_log_probs_even_asleep(rollout, model):
    """Of every token but the first, never from the cache, and as the transformers engine scores it."""
    (prompt,) = prompts(1, BLOCK + 30)
    ask(rollout, [prompt])
    change(model)
    rollout.sleep()
    rollout.update_weights(model.state_dict().items(), 1)
    scored = rollout.score(prompt)
    other = HFRollout(model, eos_token_ids=[END], pad_token_id=0).score(prompt)
    assert scored.shape == (len(prompt) - 1,)
    assert (scored - other).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda sent: sent.pop("model.norm.weight"), "1 tensors were not sent, first model.norm.weight"),
        (lambda sent: sent.update(other=torch.ones(3)), r"other \[3\] does not fit the rollout \(no such tensor\)"),
        (lambda sent: sent.update({"model.norm.weight": torch.ones(65)}), r"model.norm.weight \[65\] does not fit"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_loaded(rollout, model, spoil, said):
    """A missing, unknown or misshapen tensor is one error that names it; the engine goes on with what it had."""
    before = {name: tensor.clone() for name, tensor in rollout.resident().items()}
    change(model)
    sent = dict(model.state_dict())
    spoil(sent)
    with pytest.raises(RolloutError, match=said):
        rollout.update_weights(sent.items(), 1)
    assert rollout.version == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in rollout.resident().items())


def test_a_tied_head_need_not_be_sent(rollout, model):
    """It comes with the embedding."""
    change(model)
    rollout.update_weights([item for item in model.state_dict().items() if item[0] != "lm_head.weight"], 1)
    assert torch.equal(rollout.resident()["lm_head.weight"], model.state_dict()["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("prompt", "room", "said"),
    [
        ([], 4, "nothing to generate"),
        ([5], 0, "nothing to generate"),
        ([5] * 512, 4, "leave no room"),
        ([5, 100], 4, "token id 100 is none of the 100"),
        ([-1], 4, "token id -1"),
    ],
)
def test_a_request_it_cannot_serve_is_refused(rollout, prompt, room, said):
    """Before it reaches vLLM, which would stop for everyone; the next request is served."""
    with pytest.raises(RolloutError, match=said):
        ask(rollout, [prompt], max_tokens=room)
    assert ask(rollout, [[5, 6]])[0].token_ids


def test_what_it_generates_is_recorded_with_the_engines_own_words(rollout, tmp_path):
    """Prompts as echoed, responses, version and epoch; of narrowed sampling, the tokens likelier than each."""
    asked = prompts(3, 20)
    with hooks.recording(tmp_path, config={}, run={}), traced("rollout", component="test"):
        outputs = ask(rollout, asked, top_k=3)
    rows = [row for row in pq.read_table(tmp_path / "trace.parquet").to_pylist() if row["op"] == "generate"]
    by_field = {name: [row for row in rows if row["field"] == name] for name in ("prompts", "responses", "likelier")}
    assert {row["producer"] for row in rows} == {"VLLMRollout.generate"}
    for name, lengths in (
        ("prompts", [len(prompt) for prompt in asked]),
        ("responses", [len(output.token_ids) for output in outputs]),
    ):
        said = {key: at for row in by_field[name] for key, at in zip(row["key"], row["length"], strict=True)}
        assert said == {f"u_{place}_0": length for place, length in enumerate(lengths)}
    for row in rows:
        assert (row["weights"]["version"], row["weights"]["cache_epoch"]) == (0, rollout.cache_epoch)
        assert row["sampling"]["top_k"] == 3
    greatest = [value for row in by_field["likelier"] for value in row["max_in"]]
    assert len(greatest) == 3
    assert 0 < max(greatest) < 3


def test_asleep_it_refuses_requests(rollout):
    """The session's key is in the message."""
    rollout.sleep()
    with pytest.raises(RolloutError, match="request u_0_0: the rollout sleeps"):
        ask(rollout, [[5]])
    rollout.wake_up()
    assert ask(rollout, [[5]])[0].token_ids


def test_a_cancelled_request_is_aborted_and_what_runs_keeps_the_rest_waiting(rollout, model):
    """While a request runs there is no sleep, no sync, no reset; cancelled, the engine forgets it."""

    async def cancelled():
        asked = asyncio.create_task(
            rollout.generate(
                "u_0_0", prompt_ids=[5], sampling_params=SamplingParams(ignore_eos=True), max_tokens=500, seed=0
            )
        )
        while not rollout.engine.has_unfinished_requests():
            await asyncio.sleep(0)
        for refused in (
            rollout.sleep,
            rollout.reset_cache,
            lambda: rollout.update_weights(model.state_dict().items(), 1),
            lambda: rollout.score([5, 6]),
        ):
            with pytest.raises(RolloutError):
                refused()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    asyncio.run(cancelled())
    assert not rollout.engine.has_unfinished_requests()
    rollout.sleep()
    sync(rollout, model, 2)
    assert ask(rollout, [[5]])[0].extra_fields == {"global_steps": 2}


def test_a_step_that_fails_is_everyones_error_and_the_next_request_is_served(rollout, monkeypatch):
    """Nobody waits for ever, and nothing of the failed requests is left."""

    def fails():
        raise RuntimeError("no kernel")

    with monkeypatch.context() as broken:
        broken.setattr(rollout.engine, "step", fails)
        with pytest.raises(RolloutError, match="the rollout's engine failed: no kernel"):
            ask(rollout, prompts(3, 20))
    assert not rollout.engine.has_unfinished_requests()
    assert ask(rollout, [[5]])[0].token_ids


def test_a_zero_keeps_the_sign_it_was_sent_with(rollout, model):
    """What a packed layer gives back for -0.0 is 0.0: the same number, and another fingerprint."""
    name = next(name for name, _ in model.named_parameters() if name.endswith("o_proj.weight"))
    with torch.no_grad():
        dict(model.named_parameters())[name][0, 0] = -0.0
    rollout.sleep()
    rollout.update_weights(model.state_dict().items(), 3)
    assert torch.signbit(rollout.resident()[name][0, 0])


def test_a_model_with_heads_too_small_is_one_line():
    """vLLM would build the engine, and fail at the first request."""
    folder = find_model("tiny").folder
    with pytest.raises(UserError, match="heads of 16 are none of 32"):
        VLLMRollout(folder, eos_token_ids=[3], max_model_len=64)
