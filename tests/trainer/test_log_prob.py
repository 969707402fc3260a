"""Log-probs: shifted by one, cut to the response, blind to padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lineage.trainer import log_prob as module_under_test
from lineage.trainer.log_prob import pad_rows, response_windows, score_tokens
from lineage.trainer.models import load_model
from lineage.trainer.protocol import nested_from_list, response_window
from lineage.trainer.setup import use_few_threads


@pytest.fixture(scope="module")
def model(tiny):
    """The tiny model."""
    model = load_model(tiny)
    use_few_threads(model)
    return model


def direct(model, ids, temperature):
    """Log-probs and entropies of one sequence alone, without any padding."""
    with torch.no_grad():
        logits = model(input_ids=ids.unsqueeze(0)).logits[0].double() / temperature
    log_probs = logits.log_softmax(-1)
    return log_probs[:-1].gather(-1, ids[1:].unsqueeze(-1)).squeeze(-1), -(log_probs.exp() * log_probs).sum(-1)[:-1]


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(2, 20), min_size=1, max_size=4), st.sampled_from([0.7, 1.0, 1.3]))
def test_padded_scores_are_those_of_each_row_alone(model, lengths, temperature):
    """A row has the same log-probs and entropy in a padded batch as by itself."""
    generator = torch.Generator().manual_seed(sum(lengths))
    rows = [torch.randint(0, 90, (length,), generator=generator) for length in lengths]
    with torch.no_grad():
        scores = score_tokens(
            model,
            pad_rows(rows),
            pad_rows([torch.ones_like(row) for row in rows]),
            pad_rows([torch.arange(len(row)) for row in rows]),
            temperature=temperature,
            with_entropy=True,
        )
    for place, row in enumerate(rows):
        log_probs, entropy = direct(model, row, temperature)
        assert torch.allclose(scores.log_probs[place, : len(row) - 1].double(), log_probs, atol=1e-5)
        assert torch.allclose(scores.entropy[place, : len(row) - 1].double(), entropy, atol=1e-5)


def test_blocks_change_no_value(model, monkeypatch):
    """Scoring row by row, as a large vocabulary needs, gives what scoring at once gives."""
    ids = torch.arange(24).reshape(3, 8)
    masks = torch.ones_like(ids)
    positions = torch.arange(8).expand(3, 8)
    with torch.no_grad():
        whole = score_tokens(model, ids, masks, positions, temperature=1.0, with_entropy=True)
        monkeypatch.setattr(module_under_test, "LOGITS_BLOCK", 1)
        pieces = score_tokens(model, ids, masks, positions, temperature=1.0, with_entropy=True)
    assert torch.allclose(whole.log_probs, pieces.log_probs, atol=1e-6)
    assert torch.allclose(whole.entropy, pieces.entropy, atol=1e-6)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6))
def test_padded_window_is_the_jagged_window(lens):
    """The window cut from padded rows is the one protocol cuts from jagged rows: [prompt_len - 1 : seq_len - 1]."""
    prompts, responses = [p for p, _ in lens], [r for _, r in lens]
    rows = [torch.arange(1, p + r + 1, dtype=torch.float32) + 100 * place for place, (p, r) in enumerate(lens)]
    cut = response_windows(pad_rows(rows), prompts, responses)
    seq_lens = torch.tensor([len(row) for row in rows])
    jagged = response_window(nested_from_list(rows), torch.tensor(prompts), seq_lens)
    for place, (prompt, response) in enumerate(lens):
        assert cut[place, :response].tolist() == rows[place][prompt - 1 : prompt + response - 1].tolist()
        assert cut[place, :response].tolist() == jagged.unbind()[place].tolist()
        assert not cut[place, response:].any()
