"""Drawing tokens: by inverse distribution, one stream a row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lineage.trainer.models import eos_token_ids, load_model
from lineage.trainer.rollout.base import SamplingParams
from lineage.trainer.rollout.sampling import decode, draw, likelier, truncate, uniforms
from lineage.trainer.setup import use_few_threads


@pytest.fixture(scope="module")
def model(tiny):
    """The tiny model."""
    model = load_model(tiny)
    use_few_threads(model)
    return model


def generate(model, prompts, seeds, limits=None, ends=(), watched=False, **params):
    """Continue prompts by up to 12 tokens, or each by up to its limit."""
    return decode(
        model,
        prompts,
        limits or [12] * len(prompts),
        seeds,
        SamplingParams(**params),
        eos_token_ids=list(ends),
        pad_token_id=0,
        watched=watched,
    )


def test_draws_follow_the_distribution():
    """Over many draws each token comes as often as its probability says."""
    probs = torch.tensor([0.5, 0.25, 0.2, 0.05])
    count = 20_000
    uniform = uniforms([7], count)[0]
    tokens, log_probs = draw(probs.log().expand(count, 4), SamplingParams(), uniform)
    seen = torch.bincount(tokens, minlength=4) / count
    assert torch.allclose(seen, probs, atol=0.01)
    assert torch.allclose(log_probs, probs.log()[tokens])


@given(st.floats(0, 1, exclude_max=True), st.integers(1, 5))
def test_no_draw_falls_on_an_excluded_token(uniform, top_k):
    """Whatever number is drawn, the token is among the top_k ones."""
    logits = torch.tensor([[0.1, 2.0, -1.0, 3.0, 0.5]])
    tokens, _ = draw(logits, SamplingParams(top_k=top_k), torch.tensor([uniform], dtype=torch.float64))
    assert int(tokens) in logits[0].topk(top_k).indices.tolist()


def test_top_p_keeps_the_smallest_sufficient_nucleus():
    """Tokens are kept until their probabilities reach top_p, and the most probable one always is."""
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    kept = [int(truncate(logits, SamplingParams(top_p=p)).isfinite().sum()) for p in (0.1, 0.5, 0.6, 0.9, 1.0)]
    assert kept == [1, 1, 2, 3, 4]


def test_truncation_does_not_change_the_log_prob():
    """The recorded log-prob is over the whole vocabulary, as the trainer computes it again."""
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    tokens, log_probs = draw(logits, SamplingParams(top_k=1), torch.tensor([0.5], dtype=torch.float64))
    assert tokens.tolist() == [2]
    assert torch.allclose(log_probs, logits.log_softmax(-1)[:, 2])


def test_temperature_divides_the_processed_log_probs_only():
    """Processed log-probs are after the temperature, raw ones before it."""
    logits, half = torch.tensor([[1.0, 2.0]]), torch.tensor([0.99], dtype=torch.float64)
    _, processed = draw(logits, SamplingParams(temperature=0.5), half)
    _, raw = draw(logits, SamplingParams(temperature=0.5, logprobs_mode="raw_logprobs"), half)
    assert torch.allclose(processed, (logits / 0.5).log_softmax(-1)[:, 1])
    assert torch.allclose(raw, logits.log_softmax(-1)[:, 1])


def test_what_is_likelier_is_counted_before_truncation():
    """Ties are not likelier; the mass is that of the tempered distribution, and only a nucleus asks for it."""
    logits, tokens = torch.tensor([[1.0, 3.0, 2.0, 2.0]] * 2), torch.tensor([2, 0])
    count, mass = likelier(logits, tokens, SamplingParams(temperature=0.5, top_p=0.9))
    assert count.tolist() == [1, 3]
    probs = (logits[0] / 0.5).softmax(-1)
    assert torch.allclose(mass, torch.stack([probs[1], probs[1:].sum()]))
    assert likelier(logits, tokens, SamplingParams(top_k=2))[1].tolist() == [0.0, 0.0]


def test_a_watched_decode_draws_the_same(model):
    """Counting what is likelier changes no token; a row has as many counts as tokens, each below top_k."""
    prompts, seeds = [[5, 6, 7], [8, 9]], [1, 2]
    plain = generate(model, prompts, seeds, [4, 6], top_k=3)
    watched = generate(model, prompts, seeds, [4, 6], top_k=3, watched=True)
    assert (plain.token_ids, plain.log_probs, plain.likelier) == (watched.token_ids, watched.log_probs, None)
    assert [len(row) for row in watched.likelier] == [4, 6]
    assert all(count < 3 for row in watched.likelier for count in row)


@pytest.mark.parametrize("params", [{"do_sample": False}, {"temperature": 0.0}])
def test_greedy_takes_the_best_token(model, params):
    """Without sampling the numbers drawn do not matter."""
    assert (
        generate(model, [[5, 6, 7]], [1], **params).token_ids == generate(model, [[5, 6, 7]], [2], **params).token_ids
    )


@settings(max_examples=4, deadline=None)
@given(st.lists(st.integers(1, 15), min_size=2, max_size=4), st.integers(0, 2**62))
def test_a_row_draws_the_same_alone_and_in_any_batch(model, lengths, seed):
    """Which rows share a batch, and in which order, changes no token of a row."""
    prompts = [[(seed + 3 * place + step) % 90 + 5 for step in range(size)] for place, size in enumerate(lengths)]
    seeds = [seed + place for place in range(len(prompts))]
    together = generate(model, prompts, seeds, [5] * len(prompts))
    backwards = generate(model, prompts[::-1], seeds[::-1], [5] * len(prompts))
    for place, prompt in enumerate(prompts):
        alone = generate(model, [prompt], [seeds[place]], [5])
        assert together.token_ids[place] == alone.token_ids[0]
        assert backwards.token_ids[-1 - place] == alone.token_ids[0]
        assert together.log_probs[place] == pytest.approx(alone.log_probs[0], abs=1e-4)


def test_log_probs_are_the_models_own(model):
    """The log-prob of each drawn token is what a plain forward pass gives it."""
    drawn = generate(model, [[5, 6, 7, 8]], [3], temperature=0.8)
    ids = torch.tensor([5, 6, 7, 8, *drawn.token_ids[0]])
    with torch.no_grad():
        logits = model(input_ids=ids.unsqueeze(0)).logits[0] / 0.8
    expected = logits.log_softmax(-1)[3:-1].gather(-1, ids[4:].unsqueeze(-1)).squeeze(-1)
    assert drawn.log_probs[0] == pytest.approx(expected.tolist(), abs=1e-4)


def test_rows_end_at_an_end_token_or_their_own_limit(model):
    """A row keeps its end token and nothing after it; another is cut at its limit and says so."""
    free = generate(model, [[9, 9], [8, 8, 8]], [1, 2])
    end = free.token_ids[0][4]
    stop = free.token_ids[0].index(end) + 1
    drawn = generate(model, [[9, 9], [8, 8, 8]], [1, 2], limits=[12, 3], ends=[end])
    assert drawn.token_ids[0] == free.token_ids[0][:stop]
    assert len(drawn.log_probs[0]) == stop
    assert drawn.finished[0] is True
    if end not in free.token_ids[1][:3]:
        assert drawn.token_ids[1] == free.token_ids[1][:3]
        assert drawn.finished[1] is False


def test_ignore_eos_generates_to_the_limit(model):
    """With ignore_eos no token ends a row."""
    drawn = generate(model, [[9, 9]], [1], ends=range(100), ignore_eos=True)
    assert len(drawn.token_ids[0]) == 12
    assert drawn.finished == [False]


def test_drawing_leaves_the_global_generator_alone(model):
    """Generation takes no number from torch's global generator."""
    before = torch.get_rng_state()
    generate(model, [[5, 6]], [1])
    assert torch.equal(torch.get_rng_state(), before)


def test_end_tokens_of_the_tiny_model(model, tokenizer):
    """The tiny model ends on its chat template's end token."""
    assert eos_token_ids(model, tokenizer) == [tokenizer.eos_token_id]
