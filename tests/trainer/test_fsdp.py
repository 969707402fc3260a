"""The distributed engine: processes that hold a model together end where one that plays all ranks does."""

from __future__ import annotations

import re
import socket

import pytest
import torch
from rank_runs import facts, merged, rows_of, start
from torch import nn

import lineage
from lineage.trainer.engine.fsdp import decoder_layers
from lineage.trainer.engine.process_group import ProcessGroupError, init_process_group
from lineage.trainer.engine.topology import fsdp_topology

WORLDS = (2, 1, 4)
# which updates are done by how many ranks
UPDATES = [
    *((job, world) for job in ("plain", "packed", "adapter") for world in WORLDS),
    *(("tied", 1), ("tied", 2), ("offloaded", 2), ("bypass", 2), ("hybrid", 4)),
]


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """What every job left: of each process of each world, and of the embedded trainer (world 0) by ranks played."""
    folder = tmp_path_factory.mktemp("fsdp")
    for world in (*WORLDS, 0):
        start(folder, world)

    def read(world: int, rank: int):
        return torch.load(folder / f"done{world}_{rank}.pt", weights_only=False)

    made = {world: [read(world, rank)[world] for rank in range(world)] for world in WORLDS}
    return folder, made, read(0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_log_probs_are_those_of_one_process(runs, world):
    """Actor and reference, before an update bit for bit; each rank scores its own rows."""
    _, made, embedded = runs
    for job, name in (("plain", "log_probs"), ("plain", "ref"), ("offloaded", "ref"), ("adapter", "ref")):
        if (job, world) not in UPDATES:
            continue
        alone, together = embedded[world][job][name], merged(made[world], job, name)
        assert alone.keys() == together.keys()
        assert all(torch.equal(value, together[key]) for key, value in alone.items()), (job, name)
        assert all(len(rank[job][name]) == 8 // world for rank in made[world])
    alone, later = embedded[world]["plain"]["later"], merged(made[world], "plain", "later")
    assert all(torch.allclose(value, later[key], atol=1e-5) for key, value in alone.items())
    assert not any(torch.equal(value, later[key]) for key, value in embedded[world]["plain"]["log_probs"].items())


@pytest.mark.slow
@pytest.mark.parametrize(("job", "world"), UPDATES)
def test_an_update_is_that_of_one_process(runs, world, job):
    """Gradients of every step, weights and metrics, within float tolerance; on one rank bit for bit."""
    _, made, embedded = runs
    alone, first = embedded[world][job], made[world][0][job]
    start, exact = embedded[world]["plain"]["first"], world == 1
    assert len(alone["gradients"]) == len(first["gradients"]) >= 4
    for one, other in zip(alone["gradients"], first["gradients"], strict=True):
        assert one.abs().max() > 1e-4
        assert torch.equal(one, other) if exact else torch.allclose(one, other, rtol=1e-3, atol=1e-5)
    assert alone["weights"].keys() == first["weights"].keys()
    for name, tensor in alone["weights"].items():
        assert tensor.dtype == first["weights"][name].dtype
        same = torch.equal if exact else lambda a, b: torch.allclose(a, b, atol=1e-5)
        assert same(tensor, first["weights"][name]), name
    assert any(not torch.equal(tensor, start[name]) for name, tensor in alone["weights"].items())
    assert alone["metrics"].keys() == first["metrics"].keys()
    for name, value in alone["metrics"].items():
        assert first["metrics"][name] == (value if exact else pytest.approx(value, rel=1e-4, abs=1e-6)), name


@pytest.mark.slow
@pytest.mark.parametrize(("job", "world"), [(job, world) for job, world in UPDATES if world > 1])
def test_every_rank_says_the_same(runs, world, job):
    """Metrics and whole weights are equal on all ranks."""
    first, *others = (rank[job] for rank in runs[1][world])
    for other in others:
        assert other["metrics"] == first["metrics"]
        assert all(torch.equal(tensor, other["weights"][name]) for name, tensor in first["weights"].items())


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_what_is_tied_or_frozen_stays_so(runs, world):
    """Tied embeddings are one parameter, an adapter's base scores as before, and the tensors say what trains."""
    _, made, embedded = runs
    if ("tied", world) in UPDATES:
        assert made[world][0]["tied"]["one"]
        weights = made[world][0]["tied"]["weights"]
        assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    before, after = (merged(made[world], "adapter", name) for name in ("ref", "again"))
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    for job in ("plain", "adapter"):
        assert made[world][0][job]["status"] == embedded[world][job]["status"]


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_the_trace_tells_of_the_same_rows(runs, world):
    """Which row went to which rank, mini-batch and micro-batch is as one process plays it."""
    folder = runs[0]
    alone, together = rows_of(folder, 0, world), rows_of(folder, world, world)
    assert {row["process"] for row in together} == {f"actor:{rank}" for rank in range(world)}

    def handed(rows):
        told = [row for row in rows if row["stage"] == "update_actor" and row["op"] in ("dispatch", "split")]
        parts = [row for row in told if row["op"] == "dispatch" or row["micro_batch"] is not None]
        for row in parts:
            row["dp"] = row["coord"]["dp"]
        return facts(parts, "dp", "ppo_epoch", "mini_batch", "micro_batch", "update_index")

    assert handed(alone) == handed(together)
    whole = [[row for row in rows if row["op"] == "split" and row["micro_batch"] is None] for rows in (alone, together)]
    assert facts(whole[0], "mini_batch", "update_index") == facts(whole[1], "mini_batch", "update_index")
    assert len(whole[1]) == world * len(whole[0])


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_what_every_rank_would_say_is_said_once(runs, world):
    """Steps of the optimiser, the sample of the reference and the probe are there as one process records them."""
    folder = runs[0]
    alone, together = rows_of(folder, 0, world), rows_of(folder, world, world)

    def steps(rows):
        return [row for row in rows if row["op"] == "optim_step"]

    assert len(steps(together)) == len(steps(alone)) == 8
    for one, other in zip(steps(alone), steps(together), strict=True):
        assert other["process"] == "actor:0"
        told, said = dict(one["attrs"]), dict(other["attrs"])
        assert float(told.pop("gradient")) == pytest.approx(float(said.pop("gradient")), rel=1e-3, abs=1e-7)
        assert told == said
        assert other["optim"]["grad_norm"] == pytest.approx(one["optim"]["grad_norm"], rel=1e-5)

    def samples(rows):
        return [(row["global_steps"], row["fingerprint"]) for row in rows if row["field"] == "parameters_sample"]

    assert samples(alone) == samples(together)
    assert len(samples(alone)) == 2

    def probed(rows):
        told = [row for row in rows if row["against"] == "probe"]
        return sorted((row["global_steps"], row["stage"], row["field"], key) for row in told for key in row["key"])

    assert probed(alone) == probed(together)
    assert len(probed(alone)) == 2 * 2 * 3


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_the_checks_say_the_same(runs, world):
    """Every code that reads the update has the verdict it has of one process, and the ranks' own ones pass."""
    families = ("LOS", "BAT", "TOP", "KEY", "LGP", "VER", "LEN", "MSK")
    told = [
        {verdict.code: str(verdict.kind) for verdict in lineage.check(runs[0] / trace, select=families).verdicts}
        for trace in (f"trace0_{world}", f"trace{world}_{world}")
    ]
    assert told[0] == told[1]
    ours = (
        "BAT001",
        "BAT002",
        "BAT003",
        "KEY006",
        "LOS001",
        "LOS002",
        "LOS004",
        "LOS005",
        "TOP001",
        "TOP002",
        "VER004",
    )
    assert {told[1][code] for code in ours} == {"pass"}


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_follows_its_gradient(runs, world):
    """On the first rank, which holds the watched number, it goes on from micro-batch to micro-batch."""
    rows = [
        row for row in rows_of(runs[0], world, world) if row["loss"] is not None and row["loss"]["term"] == "pg_loss"
    ]
    last: dict = {}
    for row in sorted(rows, key=lambda row: (row["process"], row["seq"])):
        attrs = dict(row["attrs"])
        assert ("gradient_after" in attrs) == (row["process"] == "actor:0")
        if row["process"] == "actor:0":
            update = (row["global_steps"], row["update_index"])
            assert float(attrs["gradient_before"]) == last.get(update, 0.0)
            last[update] = float(attrs["gradient_after"])
    assert len(last) == 8
    assert any(last.values())


@pytest.mark.slow
@pytest.mark.parametrize(("saver", "loader"), [(2, 1), (2, 4), (1, 4), (2, 0), (4, 0), (1, 0)])
def test_what_so_many_ranks_saved_another_number_goes_on_from(runs, saver, loader):
    """Weights are those that were saved, bit for bit, and the next update is that of the run that never stopped."""
    _, made, embedded = runs
    straight = made[saver][0]["resumed"]["straight"]
    resumed = (made[loader][0] if loader else embedded[1])["resumed"][f"saved_by_{saver}"]
    assert resumed["steps"] == straight["steps"]
    assert resumed["loaded"].keys() == straight["loaded"].keys()
    assert all(torch.equal(tensor, resumed["loaded"][name]) for name, tensor in straight["loaded"].items())
    assert resumed["metrics"] == pytest.approx(straight["metrics"], rel=1e-4, abs=1e-6)
    for name, tensor in straight["weights"].items():
        assert torch.allclose(resumed["weights"][name], tensor, atol=1e-6), name
        assert not torch.equal(tensor, straight["loaded"][name]), name


@pytest.mark.slow
@pytest.mark.parametrize("world", [*WORLDS, 0])
def test_what_does_not_fit_is_refused_by_every_rank(runs, world):
    """A checkpoint that is torn, of another model or not there, and parts of unlike many rows; nothing is changed."""
    _, made, embedded = runs
    ranks = [rank["refused"] for rank in made[world]] if world else [embedded[1]["refused"]]
    for rank in ranks:
        torn, other, nowhere, *uneven = rank["said"]
        assert re.search(r"damaged_\d/__\d_0\.distcp is damaged, or not a checkpoint of this trainer$", torn)
        assert "of another model" in other
        assert "nowhere is not whole: .metadata is missing" in nowhere
        assert not any("\n" in line for line in rank["said"])
        assert rank["same"]
        handed = ", ".join(["4"] + ["2"] * (world - 1))
        said = f"the ranks were handed {handed} rows; the balance stage pads the batch first"
        assert uneven == ([said] * 2 if world > 1 else [])


def test_fsdp_size_leaves_the_data_parallel_size_alone():
    """The world is the data-parallel size, whatever one copy of the model is spread over."""
    assert [fsdp_topology(4, size).reported_dp for size in (-1, 1, 2, 4)] == [4] * 4
    assert [fsdp_topology(4, size).fsdp_size for size in (-1, 1, 2, 4)] == [4, 1, 2, 4]


def test_layers_are_those_that_are_not_to_be_split(tiny):
    """Of the tiny model its two; of a model that names none, none."""
    from lineage.trainer.models import load_model

    model = load_model(tiny)
    assert decoder_layers(model) == list(model.model.layers)
    assert decoder_layers(nn.Linear(2, 2)) == []


def test_a_rank_that_waits_for_nobody_is_one_line():
    """Ranks that never come are an error with the address, not a trace of torch."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ProcessGroupError, match=f"rank 1 of 2 did not join 127.0.0.1:{port}") as error:
        init_process_group(1, 2, master_addr="127.0.0.1", master_port=port, timeout_s=1)
    assert "\n" not in str(error.value)
