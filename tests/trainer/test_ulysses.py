"""Sequence parallelism: processes that share the sequences of a rank end where one process a rank does."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from rank_runs import facts, merged, rows_of, start

import lineage
from lineage.trainer.engine.ulysses import SequenceParallel, UlyssesError, share_sequences
from lineage.trainer.models import load_model

SP = 2
#: data-parallel ranks, each of two processes
DP = (1, 2)
pytestmark = pytest.mark.xdist_group("ulysses")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What every job left: by data-parallel size, of each process, and of the embedded trainer (by ranks played)."""
    folder = tmp_path_factory.mktemp("ulysses")
    for world in (*(dp * SP for dp in DP), 0):
        start(folder, world, str(SP))

    def read(world: int, rank: int):
        return torch.load(folder / f"done{world}_{rank}.pt", weights_only=False)

    made = {dp: [read(dp * SP, rank)[dp] for rank in range(dp * SP)] for dp in DP}
    return folder, made, read(0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("dp", DP)
def test_logits_and_gradients_are_those_of_a_whole_model(runs, dp):
    """Over two processes, and over four with KV heads for two: of padded, whole and short rows, to the last bits."""
    for rank in runs[1][dp]:
        assert len(rank["attention"]) == 4
        for far in rank["attention"]:
            assert far["logits"] < 1e-6
            assert far["gradients"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("dp", DP)
def test_log_probs_are_those_of_one_process_a_rank(runs, dp):
    """Actor and reference, before the update and after it; one process of a rank puts them."""
    _, made, embedded = runs
    for job, name in (("plain", "log_probs"), ("plain", "ref"), ("plain", "later"), ("adapter", "ref")):
        alone, together = embedded[dp][job][name], merged(made[dp], job, name)
        assert alone.keys() == together.keys()
        assert all(torch.allclose(value, together[key], atol=1e-5) for key, value in alone.items()), (job, name)
    assert [bool(rank["plain"]["log_probs"]) for rank in made[dp]] == [True, False] * dp


@pytest.mark.slow
@pytest.mark.parametrize("dp", DP)
@pytest.mark.parametrize("job", ["plain", "packed", "tied", "adapter", "bypass"])
def test_an_update_is_that_of_one_process_a_rank(runs, dp, job):
    """Gradients of every step, weights and metrics; packed rows, checkpointed layers and an adapter included."""
    _, made, embedded = runs
    alone, first = embedded[dp][job], made[dp][0][job]
    assert len(alone["gradients"]) == len(first["gradients"]) >= 4
    for one, other in zip(alone["gradients"], first["gradients"], strict=True):
        assert one.abs().max() > 1e-4
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-5)
    assert alone["weights"].keys() == first["weights"].keys()
    for name, tensor in alone["weights"].items():
        assert torch.allclose(tensor, first["weights"][name], atol=1e-5), name
    assert first["metrics"] == pytest.approx(alone["metrics"], rel=1e-4, abs=1e-6)
    for other in made[dp][1:]:
        assert other[job]["metrics"] == first["metrics"]
        assert all(torch.equal(tensor, other[job]["weights"][name]) for name, tensor in first["weights"].items())


@pytest.mark.slow
@pytest.mark.parametrize("dp", DP)
def test_each_process_tells_what_it_was_given(runs, dp):
    """Both have a rank's rows; the slices of every row, put together, are the row."""
    rows = rows_of(runs[0], dp * SP, dp)
    alone = rows_of(runs[0], 0, dp)
    assert {row["process"] for row in rows} == {f"actor:{rank}" for rank in range(dp * SP)}
    given = Counter()
    for row in rows:
        if row["field"] == "input_ids_slice":
            attrs = dict(row["attrs"])
            assert int(attrs["begins"]) == row["coord"]["sp"] * int(attrs["width"])
            for key, length in zip(row["key"], row["length"], strict=True):
                given[(row["global_steps"], row["stage"], row["update_index"], key)] += length
    whole = {
        (row["global_steps"], row["stage"], row["update_index"], key): length
        for row in alone
        if row["op"] == "pad" and row["field"] == "input_ids"
        for key, length in zip(row["key"], row["valid_length"], strict=True)
    }
    assert given == whole
    handed = [
        facts([row for row in rows if row["op"] == "dispatch" and row["coord"]["sp"] == sp], "op") for sp in range(SP)
    ]
    assert handed[0] == handed[1] == facts([row for row in alone if row["op"] == "dispatch"], "op")


@pytest.mark.slow
@pytest.mark.parametrize("dp", DP)
def test_what_is_alike_is_said_once(runs, dp):
    """Scores, losses, steps and probes are told as one process a rank tells them, by the first of each rank."""
    rows, alone = rows_of(runs[0], dp * SP, dp), rows_of(runs[0], 0, dp)

    def told(rows):
        kinds = ("forward", "compare", "optim_step")
        return Counter(
            (row["global_steps"], row["stage"], row["op"], row["field"], row["against"], key)
            for row in rows
            if row["op"] in kinds or row["loss"] is not None
            for key in row["key"] or [None]
        )

    assert told(rows) == told(alone)
    assert {row["coord"]["sp"] for row in rows if row["op"] in ("forward", "compare")} == {0}


@pytest.mark.slow
@pytest.mark.parametrize("dp", DP)
def test_the_checks_say_the_same(runs, dp):
    """Every code that reads the update has the verdict it has of one process a rank."""
    families = ("LOS", "BAT", "TOP", "KEY", "LGP", "VER", "LEN", "MSK")
    told = [
        {verdict.code: str(verdict.kind) for verdict in lineage.check(runs[0] / trace, select=families).verdicts}
        for trace in (f"trace0_{dp}", f"trace{dp * SP}_{dp}")
    ]
    assert told[0] == told[1]
    assert {told[1][code] for code in ("BAT001", "BAT002", "KEY006", "LOS001", "TOP001", "TOP002")} == {"pass"}


@pytest.mark.slow
@pytest.mark.parametrize(("saver", "loader"), [(2, 4), (2, 0), (4, 0)])
def test_a_checkpoint_goes_on_with_another_layout(runs, saver, loader):
    """What two processes of one rank saved, two ranks of two go on from, and one process."""
    _, made, embedded = runs
    straight = made[saver // SP][0]["resumed"]["straight"]
    resumed = (made[loader // SP][0] if loader else embedded[1])["resumed"][f"saved_by_{saver}"]
    assert all(torch.equal(tensor, resumed["loaded"][name]) for name, tensor in straight["loaded"].items())
    assert resumed["metrics"] == pytest.approx(straight["metrics"], rel=1e-4, abs=1e-6)
    for name, tensor in straight["weights"].items():
        assert torch.allclose(resumed["weights"][name], tensor, atol=1e-6), name


@pytest.mark.parametrize("length", [1, 2, 5, 6])
def test_slices_put_together_are_the_sequence(length):
    """Every token is in one slice, zeros fill the last up, and all are of one width."""
    whole = torch.arange(1, length + 1).expand(3, length)
    parts = [SequenceParallel(2, rank, None).own(whole) for rank in range(2)]
    assert {part.shape for part in parts} == {(3, SequenceParallel(2, 0, None).width(length))}
    joined = torch.cat(parts, dim=-1)
    assert torch.equal(joined[:, :length], whole)
    assert not joined[:, length:].any()


def test_heads_that_do_not_divide_are_one_line(tiny):
    """The tiny model's four heads over three ranks."""
    with pytest.raises(UlyssesError, match=r"^ulysses_sequence_parallel_size=3: 4 attention heads do not divide"):
        share_sequences(load_model(tiny), SequenceParallel(3, 0, None))
