"""The prompt that actor and engine both score after a sync."""

from __future__ import annotations

import torch

from lineage.trainer.rollout.hf import HFRollout
from lineage.trainer.weight_sync import PROBE_TOKENS


def probed(run) -> list[dict]:
    return run.select(op="compare", field="probe_log_probs", against="probe")


def test_engine_and_actor_agree_on_the_probe_after_every_sync(traced_run):
    """Of every token but the first, at the version the sync brought, and the trace is as clean as without."""
    run = traced_run()
    rows = probed(run)
    assert [row["weights"]["version"] for row in rows] == [0, 1, 2]
    assert {(row["stage"], row["entity"], *row["key"], *row["n_in"]) for row in rows} == {
        ("weight_sync", "param", "probe", PROBE_TOKENS - 1)
    }
    assert all(row["absdiff_max"] == [0.0] for row in rows)
    assert set(run.judged().values()) <= {"pass", "vacuous", "not_applicable"}


def test_what_an_engine_computes_with_shows_even_where_its_tensors_do_not(traced_run, monkeypatch):
    """An engine whose tensors are all as they were sent, and which does not compute with them."""
    score = HFRollout.score

    def scores_by_an_older_head(engine, token_ids):
        with torch.no_grad():
            engine.module.lm_head.weight.mul_(1.5)
            stale = score(engine, token_ids)
            engine.module.lm_head.weight.div_(1.5)
        return stale

    monkeypatch.setattr(HFRollout, "score", scores_by_an_older_head)
    assert all(row["absdiff_max"][0] > 1e-3 for row in probed(traced_run()))


def test_without_the_rows_of_weights_nobody_scores_the_probe(traced_run, monkeypatch):
    """It costs a forward pass on both sides."""

    def unasked(engine, token_ids):
        raise AssertionError("the engine was asked")

    monkeypatch.setattr(HFRollout, "score", unasked)
    assert not probed(traced_run("trace.weights=false"))
