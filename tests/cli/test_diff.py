"""``lineage diff``: exit codes, what is printed, and runs of the reference trainer held against each other."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from lineage.schema import META_STATE, META_VERSION

SAMPLES = Path(__file__).parents[2] / "traces" / "samples"
GOOD, MASK = SAMPLES / "good.parquet", SAMPLES / "bad" / "MSK001.parquet"


def rewritten(source, target, **meta):
    """A trace with other metadata."""
    table = pq.read_table(source)
    said = {**(table.schema.metadata or {}), **{name.encode(): value for name, value in meta.items()}}
    pq.write_table(table.replace_schema_metadata(said), target)
    return target


def test_equal_traces_exit_with_0(command):
    """One line that says so, then the two sides."""
    done = command("diff", GOOD, GOOD)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == [
        "equal: 2,136 facts, 3 steps in both",
        "",
        f"A  {GOOD} (run good): 2,136 facts in 402 rows of 1 process",
        f"B  {GOOD} (run good): 2,136 facts in 402 rows of 1 process",
    ]


def test_the_headline_is_the_first_parting_of_a_fault(command):
    """A fault of the loss mask parts at the row that wrote the mask; what follows from it is counted below."""
    done = command("diff", GOOD, MASK, "-q")
    assert done.code == 1
    assert done.out.splitlines() == [
        "different: 2,136 facts, 3 steps in both",
        "first apart at step 2, stage rollout: mask of loss_mask",
        "  event     produce loss_mask (driver, seq 295)",
        "  at        8ccb18c9-cc60-4cf2-b9cb-b2a1635eed84_1_0",
        "  expected  mask_sum 4, mask_fingerprint b6a8e088eecadafc",
        "  actual    mask_sum 3, mask_fingerprint 3c2414c0d76844d2",
    ]
    whole = command("diff", GOOD, MASK, "--limit", 1).out
    assert "  mask           5 facts: the mask over them\n" in whole
    assert "update_actor consume loss_mask: 1, from step 2" in whole
    assert whole.count("also apart") == 4  # of the five aspects one is the headline


def test_json_is_one_value_with_all_of_it(command):
    """The same in JSON: the headline, the counts, the examples, what is allowed."""
    done = command("diff", GOOD, MASK, "--json")
    said = json.loads(done.out)
    assert done.code == said["exit_code"] == 1
    assert set(said) == {
        "equal", "complete", "exit_code", "a", "b", "steps", "only_a", "only_b", "unseen", "first", "counts",
        "differences", "stages", "settings", "disjoint", "allowed",
    }  # fmt: skip
    assert said["first"] == {
        "aspect": "mask",
        "global_steps": 2,
        "stage": "rollout",
        "op": "produce",
        "field": "loss_mask",
        "entity": "trajectory",
        "key": "8ccb18c9-cc60-4cf2-b9cb-b2a1635eed84_1_0",
        "turn": None,
        "a": {"process": "driver", "seq": 295},
        "b": {"process": "driver", "seq": 295},
        "expected": "mask_sum 4, mask_fingerprint b6a8e088eecadafc",
        "actual": "mask_sum 3, mask_fingerprint 3c2414c0d76844d2",
        "alike": 1,
        "keys": ["8ccb18c9-cc60-4cf2-b9cb-b2a1635eed84_1_0"],
    }
    assert said["first"] in said["differences"]
    assert {one["aspect"]: one["group"] for one in said["counts"]}["mask"] == "content"


def test_what_is_ignored_is_listed_and_does_not_count(command):
    """``--ignore`` takes aspects and groups; the difference stays visible."""
    done = command("diff", GOOD, MASK, "--ignore", "content")
    assert done.code == 0
    assert done.out.startswith("equal, but for mask, fingerprint, weights, comparison, context, which do not count: ")
    assert "does not count\n  mask           5 facts" in done.out
    assert command("diff", GOOD, MASK, "--ignore", "fingerprint,weights,comparison", "--ignore", "context").code == 1


@pytest.mark.parametrize(
    ("code", "stage", "field", "aspect"),
    [
        ("MSK001", "rollout", "loss_mask", "mask"),
        ("LEN007", "rollout", "rollout_log_probs", "layout"),
        ("QUE005", "rollout", "status", "copies"),
        ("QUE009", "old_log_prob", "log_probs", "requires_grad"),
        ("VER007", "weight_sync", "rollout", "copies"),
        ("REW004", "reward", "rm_scores", "missing"),
        ("VER001", "rollout", "status", "tags"),
        ("TOK002", "reward", "responses", "length"),
    ],
)
def test_a_fault_parts_where_it_begins(command, code, stage, field, aspect):
    """A run with one fault against the clean one of the same configuration: where it shows first, and how."""
    done = command("diff", GOOD, SAMPLES / "bad" / f"{code}.parquet", "--json")
    first = json.loads(done.out)["first"]
    assert done.code == 1
    assert (first["global_steps"], first["stage"], first["field"], first["aspect"]) == (2, stage, field, aspect)


def test_rows_that_went_to_another_rank_are_place(command):
    """Which rank got which rows is listed, and counts only where it is asked to."""
    sides = (GOOD, SAMPLES / "bad" / "BAT001.parquet")
    assert command("diff", *sides).code == 0
    assert command("diff", *sides, "--strict").code == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ignore", "layuot"], "error: --ignore: no aspect 'layuot', did you mean 'layout'; known: steps, missing, "),
        (["--steps", "3..1"], "error: --steps: '3..1' is no step and no range of them, as 3 or 3..7"),
        (["--steps", "many"], "error: --steps: 'many' is no step and no range of them"),
        (["--steps", "8"], "error: no step from 8 to 8 in "),
        (["--rtol", "-1"], "error: invalid value for '--rtol'"),
    ],
)
def test_a_wrong_use_is_one_line(command, arguments, said):
    """Exit 2, nothing on stdout, no traceback."""
    done = command("diff", GOOD, MASK, *arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(said)
    assert done.err.count("\n") == 1


def test_an_unusable_trace_is_one_line(command, tmp_path):
    """Either side: not there, not a trace, of a newer schema, of several runs."""
    newer = rewritten(GOOD, tmp_path / "newer.parquet", **{META_VERSION.decode(): b"99"})
    (tmp_path / "text.parquet").write_text("hello")
    for other, said in (
        (tmp_path / "gone", "no such file or folder"),
        (tmp_path / "text.parquet", "not a Parquet file"),
        (newer, "schema version 99 is newer than 1"),
        (str(SAMPLES / "bad" / "MSK00[12].parquet"), "rows of 2 runs (MSK001, MSK002)"),
    ):
        for sides in ((GOOD, other), (other, GOOD)):
            done = command("diff", *sides)
            assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
            assert said in done.err


def test_an_incomplete_trace_exits_with_3_where_nothing_else_differs(command, tmp_path):
    """What is missing could differ: no pass. A difference that is there beats it."""
    said = json.dumps({"closed": False, "torn": [2]}).encode()
    torn = rewritten(GOOD, tmp_path / "torn.parquet", **{META_STATE.decode(): said})
    done = command("diff", GOOD, torn)
    assert done.code == 3
    assert done.out.startswith("equal: 1,125 facts, 2 steps in both\nincomplete: what is missing could differ")
    assert "not compared, for they are not whole: step 2" in done.out
    assert command("diff", GOOD, torn, "--json").code == 3
    changed = rewritten(MASK, tmp_path / "b.parquet", **{META_STATE.decode(): json.dumps({"closed": False}).encode()})
    assert command("diff", GOOD, changed).code == 1


def test_a_shorter_run_is_said_to_be_shorter(command, tmp_path):
    """Steps that one side alone has are in the headline, whether they count or not."""
    table = pq.read_table(GOOD)
    short = tmp_path / "short.parquet"
    pq.write_table(table.filter(pc.less(table["global_steps"], 2)), short)
    assert command("diff", GOOD, short, "-q").out == ("different: 1,125 facts, 2 steps in both\nin A only: step 2\n")
    done = command("diff", short, GOOD, "-q", "--ignore", "steps")
    assert done.code == 0
    assert done.out.endswith("\nin B only: step 2, which does not count\n")


def test_what_a_trace_says_cannot_break_a_line(command, tmp_path):
    """A key with a line break or an escape sequence is printed as Python would."""
    table = pq.read_table(GOOD)
    at = next(n for n, key in enumerate(table["key"].to_pylist()) if key and table["stage"][n].as_py() == "sample")
    keys = table["key"].to_pylist()
    keys[at] = ["a\nb\x1b[31m", *keys[at][1:]]
    index = table.schema.get_field_index("key")
    odd = table.set_column(index, table.schema.field("key"), [keys])
    pq.write_table(odd, tmp_path / "odd.parquet")
    done = command("diff", tmp_path / "odd.parquet", GOOD)
    assert done.code == 1
    assert "\x1b" not in done.out
    assert r"a\nb\x1b[31m" in done.out


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Records a run of the reference trainer, each configuration once."""
    pytest.importorskip("torch")
    from lineage.trainer.faults.lab import record

    folder, made = tmp_path_factory.mktemp("diff"), {}

    def run(name, *overrides):
        if name not in made:
            made[name] = record(folder / f"{name}.parquet", overrides=overrides)
        return made[name]

    return run


def aspects(command, a, b, *options):
    """Exit code, the aspects that count with their fields, and those that do not."""
    done = command("diff", a, b, "--json", *options)
    said = json.loads(done.out)
    counted = {}
    for one in said["counts"]:
        counted.setdefault((one["counts"], one["aspect"]), set()).add(f"{one['stage']} {one['field']}")
    return done.code, {k[1]: v for k, v in counted.items() if k[0]}, {k[1] for k in counted if not k[0]}, said


def test_two_runs_of_one_seed_are_equal(command, recorded):
    """A configuration run twice says the same, to the last fact."""
    code, counted, _, said = aspects(command, recorded("one"), recorded("two"), "--strict")
    assert (code, counted, said["settings"]) == (0, {}, [])


def test_another_seed_has_no_key_in_common(command, recorded):
    """One line that names the seeds, and exit 1."""
    done = command("diff", recorded("one"), recorded("other", "trainer.seed=7"), "-q")
    assert done.code == 1
    assert done.out == ("different: no trajectory key and no uid is in both traces (seed 42 in A, 7 in B)\n")


def test_other_micro_batches_change_what_micro_batching_changes(command, recorded):
    """How rows are cut, the width they are padded to, the last bits of the gradient, and what follows from those."""
    fine = recorded("fine", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1")
    code, counted, free, said = aspects(command, recorded("one"), fine)
    assert code == 1
    assert set(counted) <= {"micro_batch", "layout", "rounding", "weights", "fingerprint", "comparison"}
    assert counted["micro_batch"] == {"update_actor loss"}
    assert all(place.startswith("update_actor ") for place in counted["layout"])
    # tokens are the same; what has no statistics, or is a difference of nearly equal numbers, cannot be called rounded
    assert counted["weights"] == {"weight_sync parameters"}
    assert counted.get("fingerprint", set()) <= {"metrics metrics"}
    assert free <= {"rank", "rows", "counters", "timing", "topology"}
    assert said["first"]["stage"] == "update_actor"
    only_bits = ("--ignore", "micro_batch,layout,rounding,weights,fingerprint,comparison")
    assert command("diff", recorded("one"), fine, *only_bits).code == 0


def test_another_layout_is_listed_as_place(command, recorded):
    """One rank against two: tokens, masks, rewards and tags are the same; ranks, topology and rows are allowed."""
    code, counted, free, said = aspects(command, recorded("one"), recorded("rank", "trainer.n_gpus_per_node=1"))
    assert code == 1
    assert {"rank", "topology", "rows"} <= free
    assert not {"length", "mask", "tags", "dtype", "context", "steps", "copies"} & set(counted)
    # the probe scores other rows of another layout
    assert counted.get("missing", set()) <= {
        f"{stage} {name}" for stage in ("old_log_prob", "ref_log_prob") for name in ("log_probs", "entropy")
    }
    assert [one["name"] for one in said["settings"]] == ["trainer.n_gpus_per_node"]


def test_a_resumed_run_is_the_one_that_never_stopped(command, tmp_path):
    """Of the steps both have, nothing differs that counts but the checkpoint that one of them wrote."""
    pytest.importorskip("torch")
    from lineage.trainer.faults.lab import record, record_halves

    whole = record(tmp_path / "whole.parquet")
    _, second = record_halves(tmp_path / "first.parquet", tmp_path / "second.parquet", 1)
    code, counted, free, said = aspects(command, whole, second, "--steps", "2")
    assert counted == {"missing": {"checkpoint checkpoint"}}
    assert said["stages"] == [{"stage": "checkpoint", "only": "b", "steps": [2]}]
    assert "counters" in free
    assert code == 1
