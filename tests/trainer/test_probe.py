"""The second look: which rows are probed, and that looking changes nothing."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from lineage import hooks
from lineage.hooks import Weights
from lineage.trainer.batching.micro_batches import MicroBatchLimit
from lineage.trainer.engine.ranks import Ranks
from lineage.trainer.models import ModelSource, load_model
from lineage.trainer.probe import SAMPLE, probe, record_sample, to_probe
from lineage.trainer.training import SequenceRows, infer_rows


@pytest.mark.parametrize(
    ("lengths", "behind", "padding", "expected"),
    [
        ([9, 7, 5, 8], [0, 1, 0, 1], [False] * 4, [1]),  # the shortest is first of its pass: nothing leaks into it
        ([9, 7, 7], [0, 1, 2], [False] * 3, [2]),  # of equals the one behind most
        ([9, 3], [0, 1], [False, True], [0]),  # a padding row is nobody's
        ([9], [0], [True], []),
    ],
)
def test_the_most_exposed_row_is_probed(
    lengths: list[int], behind: list[int], padding: list[bool], expected: list[int]
) -> None:
    """The shortest real row that is not first of its forward pass, else the shortest."""
    assert to_probe(lengths, behind, padding, 1) == expected


def test_a_row_alone_scores_as_in_its_batch(tiny: ModelSource, tmp_path: Path) -> None:
    """The probe finds what the batch gave, draws no number and leaves no gradient."""
    model = load_model(tiny, dtype="fp32", device=torch.device("cpu"))
    ids = [torch.arange(5, 5 + length) for length in (7, 4)]
    columns = {
        "input_ids": ids,
        "attention_mask": [torch.ones_like(row) for row in ids],
        "position_ids": [torch.arange(len(row)) for row in ids],
    }
    rows = SequenceRows(["a_0_0", "b_0_0"], columns, [0, 0])
    limit = MicroBatchLimit(2)
    scored = {"temperature": 0.7, "with_entropy": True, "pad_token_id": 0}
    scores = infer_rows(model, rows, micro_batches=limit, ranks=Ranks.embedded(1), **scored)
    state = torch.get_rng_state()
    with hooks.recording(tmp_path) as recorder:
        recorder.step(1)
        with recorder.stage("old_log_prob"):
            probe(model, rows, scores, 0.7, [1])
    table = pq.read_table(tmp_path / "trace.parquet").to_pylist()
    assert [(row["field"], row["against"], row["n_in"]) for row in table] == [
        ("log_probs", "probe", [4]),
        ("entropy", "probe", [4]),
    ]
    assert max(row["absdiff_max"][0] for row in table) < 1e-5
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_sample_sees_every_tensor_change(tmp_path: Path) -> None:
    """Weights of any size have a place in the sample, and a tensor as small as one element is in it whole."""
    weights = {"large": torch.zeros(3 * SAMPLE + 1), "one": torch.zeros(()), "few": torch.zeros(2, 3)}
    said = []
    with hooks.recording(tmp_path) as recorder:
        for step, name in enumerate((None, "large", "one", "few"), start=1):
            if name is not None:
                weights[name] += 1
            recorder.step(step)
            with recorder.stage("ref_log_prob"):
                record_sample(weights, Weights(0, "ref"))
    said = pq.read_table(tmp_path / "trace.parquet")["fingerprint"].to_pylist()
    assert len({row[0] for row in said}) == 4
