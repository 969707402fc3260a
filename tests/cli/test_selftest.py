"""``lineage selftest``: what it says of a fault, of a clean run and of one that is not, and the page it writes."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lineage.checks.catalogue import catalogue
from lineage.cli import selftest, selftest_page, selftest_text, trials
from lineage.cli.together import Judgement
from lineage.cli.trials import Kind, Outcome, Place, Result, Seen, Trial, attempt, attempt_together
from lineage.errors import MissingExtraError, UserError
from lineage.trainer.faults.registry import Fault, all_faults

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "selftest.md"
SAMPLES = ROOT / "traces" / "samples"
GOOD, WARNS = SAMPLES / "good.parquet", SAMPLES / "bad" / "QUE006.parquet"
WANTED = Place("MSK002", "update_actor", 2)


def outcome(result: Result, name: str = "some_fault", kind: Kind = Kind.FAULT, **said: object) -> Outcome:
    """An outcome made by hand."""
    wanted = WANTED if kind is Kind.FAULT else None
    return Outcome(Trial(kind, name), result, wanted, **said)  # type: ignore[arg-type]


CAUGHT = outcome(
    Result.CAUGHT,
    blamed=WANTED,
    headline=("MSK002 ...",),
    seen={"KEY001": Seen("pass", 9, 0, 0), "MSK002": Seen("fail", 9, 1, 0)},
)
OFFENDERS = (
    outcome(Result.MISSED, "missed_one"),
    outcome(Result.WRONG_CODE, "wrong_code_one", blamed=Place("KEY001", "rollout", 2)),
    outcome(Result.WRONG_STAGE, "wrong_step_one", blamed=Place("MSK002", "update_actor", 1)),
    outcome(Result.CRASHED, "crashed_one", error="ValueError: no"),
    outcome(Result.FALSE_ALARM, "tools", Kind.CLEAN, blamed=Place("KEY001", "rollout", 1)),
    outcome(Result.BROKEN, "some_law", Kind.LAW, error="the weights differ"),
)


def test_every_offender_is_named_with_what_was_wanted() -> None:
    """A missed fault, a wrong code, a wrong step, a crash, a false alarm and a broken law: a line each."""
    lines = list(selftest_text.lines([CAUGHT, *OFFENDERS], 3.0, 2, each=False, matrix=False))
    assert lines[0] == "5 faults: 1 caught, 1 missed, 1 wrong code, 1 wrong stage, 1 crashed"
    assert "  missed: missed_one: wanted MSK002 at update_actor, step 2; got nothing" in lines
    assert any(line.startswith("  wrong code: wrong_code_one: ") and "got KEY001 at rollout" in line for line in lines)
    assert any(line.startswith("  wrong stage: wrong_step_one: ") for line in lines)
    assert "  crashed: crashed_one: ValueError: no" in lines
    assert any(line.startswith("  false alarm: tools: KEY001 at rollout, step 1") for line in lines)
    assert "  broken: some_law: the weights differ" in lines
    assert lines[-1] == "2 codes, 7 trials in 3 s with 2 workers"
    lines = list(selftest_text.lines([CAUGHT], 3.0, 1, each=False, matrix=False))
    assert lines == ["1 fault: 1 caught", "2 codes, 1 trial in 3 s with 1 worker"]


def test_an_interrupted_selftest_says_how_far_it_came(monkeypatch, capsys) -> None:
    """Ctrl-C: what was done until then and what was not as it should be, in a line; the interrupt goes on."""
    tried = [one.trial for one in (CAUGHT, *OFFENDERS)]

    def some(*_: object) -> Iterator[Outcome]:
        yield from (CAUGHT, OFFENDERS[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(selftest, "outcomes", some)
    with pytest.raises(KeyboardInterrupt):
        selftest._run(tried, 1, None)
    said = capsys.readouterr()
    assert said.err == "interrupted: 2 of 7 trials done; not as they should be: missed_one (missed)\n"
    assert said.out == ""


def test_what_is_tried_is_what_was_named() -> None:
    """A code or a family of codes chooses its faults, for a matrix as well; without either all are tried."""
    every = all_faults().values()
    assert [one.name for one in selftest._trials((), ["que001"], True, 0, None, True)] == [
        one.name for one in every if one.code == "QUE001"
    ]
    masks = [one.name for one in every if "MSK" in (one.code[:3], *(code[:3] for code in one.also))]
    assert [one.name for one in selftest._trials((), ["MSK"], False, 0, None, True)] == masks
    assert [one.name for one in selftest._trials(["late_writer"], (), False, 0, None, True)] == ["late_writer"]
    assert len(selftest._trials((), (), True, 0, None, True)) == len(every)


def test_faults_between_processes_are_tried_apart() -> None:
    """``--mode ray`` tries those and clean runs of several ranks, each a cluster of its own; nothing else does."""
    every = selftest._trials_on_ray((), ())
    assert [one.name for one in every if one.kind is Kind.FAULT] == list(all_faults("ray"))
    assert [one.name for one in every if one.kind is Kind.CLEAN] == [
        "two_ranks_on_ray",
        "four_ranks_on_ray",
        "vllm_on_ray",
    ]
    assert all(len(some) == 1 for some in trials._some(every, 1))
    assert [one.name for one in selftest._trials_on_ray((), ["que001"])] == ["rank_writes_after_the_clear"]
    with pytest.raises(UserError, match="no fault between processes is of MSK002"):
        selftest._trials_on_ray((), ["MSK002"])


def test_without_vllm_its_faults_are_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without the real engine tries the others and names what it left; one asked for by name is an error."""
    every = selftest._trials_on_ray((), ())
    real = [one.name for one in every if trials.on_vllm(one)]
    assert {"stale_tied_head", "vllm_on_ray"} <= set(real) < {one.name for one in every}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "vllm" else object())
    left, out = selftest._without_vllm(every, named=False)
    assert out == real
    assert [one.name for one in left] == [one.name for one in every if one.name not in real]
    with pytest.raises(MissingExtraError, match=r"the fault stale_tied_head needs the 'vllm' extra"):
        selftest._without_vllm(selftest._trials_on_ray(["stale-tied-head"], ()), named=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert selftest._without_vllm(every, named=False) == (list(every), [])


def test_the_matrix_says_who_else_fails() -> None:
    """A line a fault: its code, and the others that fail on it; brackets around a code that is silent."""
    seen = {"MSK002": Seen("pass", 9, 0, 0), "QUE003": Seen("fail", 9, 1, 0)}
    lines = list(selftest_text.matrix_lines([CAUGHT, outcome(Result.WRONG_CODE, "other", seen=seen)]))
    assert lines == ["MSK002    some_fault  only this code", "(MSK002)  other       also QUE003"]
    assert selftest_text.only_by([CAUGHT]) == {"MSK002": ["some_fault"]}


def test_a_page_has_a_part_for_each_command(tmp_path: Path) -> None:
    """A whole selftest and the random clean runs each write their part and leave the other."""
    page = tmp_path / "selftest.md"
    selftest_page.write(page, [CAUGHT, *OFFENDERS[:-1]], 3.0, 2, None)
    first = page.read_text("utf-8")
    assert "\nNot tried yet (lineage selftest --clean-runs --write).\n" in first
    assert selftest_page.faults_on(first) == [one.trial.name for one in (CAUGHT, *OFFENDERS[:4])]
    clean = outcome(Result.CLEAN, "random 0", Kind.CLEAN, seen={"KEY001": Seen("vacuous", 0, 0, 0)})
    selftest_page.write(page, [clean], 1.0, 2, seed=5)
    both = page.read_text("utf-8")
    assert "`lineage selftest --clean-runs 1 --seed 5`: 1 clean, 0 not" in both
    assert "Not tried yet" not in both
    assert "codes that never saw anything to judge: KEY001" in both
    assert both.startswith(first.partition("<!-- clean runs")[0])


def test_a_page_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    """A file that this command did not make is not written over."""
    from lineage.errors import UserError

    page = tmp_path / "notes.md"
    page.write_text("mine\n")
    with pytest.raises(UserError, match="name a page this command made"):
        selftest_page.write(page, [CAUGHT], 3.0, 2, None)
    assert page.read_text() == "mine\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--fault", "nonsense_without_like"), "no fault 'nonsense_without_like'"),
        (("--fault", "late_writer", "--code", "KEY001"), "give one of the two"),
        (("--matrix", "--clean-runs", "1"), "--clean-runs tries no fault"),
        (("--matrix", "--write", "x.md"), "leave --fault, --code, --matrix out"),
        (("--code", "KEY99"), "KEY99"),
        (("--clean-runs", "0"), "--clean-runs"),
        (("--seed", "5"), "give --clean-runs N as well"),
        (("--no-laws", "--matrix"), "--no-laws is for a whole selftest"),
        (("--laws", "--clean-runs", "1"), "--laws is for a whole selftest"),
    ],
)
def test_a_wrong_use_is_one_line(command, arguments, says) -> None:
    """Exit code 2, before any run is recorded."""
    done = command("selftest", *arguments)
    assert (done.code, done.out) == (2, "")
    assert says in done.err
    assert len(done.err.splitlines()) == 1


def test_without_the_train_extra_it_is_one_line(command, monkeypatch) -> None:
    """The base has no trainer to try: what is missing, and the line that installs it."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else real(name))
    for name in ("selftest", "faults"):
        done = command(name)
        assert (done.code, done.out) == (2, "")
        (line,) = done.err.splitlines()
        assert 'pip install "rl-lineage[train]"' in line


def test_a_run_that_raises_is_an_outcome(tmp_path: Path) -> None:
    """A configuration that cannot run is a crash with its line, not the end of the selftest."""
    done = attempt(Trial(Kind.CLEAN, "impossible", ("data.train_batch_size=1",)), tmp_path)
    assert done.result is Result.CRASHED
    assert done.error.startswith("ConfigError: ")


def test_a_clean_run_is_judged_by_every_code_and_its_trace_goes(tmp_path: Path) -> None:
    """Nothing fails on the lab's own configuration, and nothing is left unless it is kept."""
    done = attempt(Trial(Kind.CLEAN, "lab"), tmp_path)
    assert (done.result, done.error, done.headline) == (Result.CLEAN, "", ())
    assert set(done.seen) == {one.code for one in catalogue()}
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, Path], None]:
    """Let the lab record these samples in place of runs, one with a fault, one without, and few codes judge them."""

    def _recorded(faulty: Path, clean: Path) -> None:
        def record(target: Path, fault: Fault | None = None, overrides: Sequence[str] = ()) -> Path:
            table = pq.read_table(clean if fault is None or fault.kind == "trace" else faulty)
            run_id = pa.array([target.stem] * len(table))
            pq.write_table(table.set_column(table.schema.get_field_index("run_id"), "run_id", run_id), target)
            return target

        monkeypatch.setattr("lineage.trainer.faults.lab.record", record)
        few = tuple(one for one in catalogue() if one.code in ("KEY001", "QUE006"))
        monkeypatch.setattr("lineage.checks.catalogue.catalogue", lambda: few)

    return _recorded


def test_a_clean_run_that_warns_is_a_false_alarm(tmp_path: Path, recorded: Callable[[Path, Path], None]) -> None:
    """A warning on a run without a fault is as wrong as an error, judged alone or beside others: it is named."""
    recorded(GOOD, WARNS)
    tried = [Trial(Kind.CLEAN, "one"), Trial(Kind.CLEAN, "other")]
    for done in (attempt(tried[0], tmp_path), *attempt_together(tried, tmp_path)):
        assert (done.result, done.failed) == (Result.FALSE_ALARM, ())
        assert done.blamed is not None
        assert done.blamed.code == "QUE006"
        assert selftest_text.offence(done).startswith(f"{done.trial.name}: {done.blamed}: expected")


def test_a_warning_that_is_true_of_the_configuration_is_none() -> None:
    """A rejection makes two masks of one, and MSK002 says so; without one they must be one."""
    warned = Judgement(None, (Place("MSK002", "update_actor", 1),), {}, clean=True)
    rejecting = Trial(Kind.CLEAN, "rejecting", ("+algorithm.rollout_correction.rollout_rs=token_k1",))
    assert trials._clean(rejecting, warned)
    assert not trials._clean(Trial(Kind.CLEAN, "lab"), warned)
    assert not trials._clean(rejecting, replace(warned, warned=(Place("LOS004", "update_actor", 1),)))
    alike = replace(warned, warned=(Place("REW004", "sample", 2),))
    for temperature, clean in (("0.01", True), ("0.7", False)):
        setting = f"actor_rollout_ref.rollout.temperature={temperature}"
        assert trials._clean(Trial(Kind.CLEAN, "drawn", (setting,)), alike) is clean


def test_a_clean_run_that_alarms_beside_others_alone_is_a_false_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: Callable[[Path, Path], None]
) -> None:
    """It is judged again by itself for its headline, and not acquitted by that."""
    recorded(GOOD, GOOD)
    place = Place("QUE003", "reward", 2)
    fails = Judgement(place, (), {}, clean=False)
    monkeypatch.setattr(trials, "judged_together", lambda _, names: dict.fromkeys(names, fails))
    (done,) = attempt_together([Trial(Kind.CLEAN, "lab")], tmp_path)
    assert (done.result, done.blamed) == (Result.FALSE_ALARM, place)
    assert done.error == "only beside other runs: QUE003 at reward, step 2"


@pytest.mark.parametrize(("clean", "result"), [(GOOD, Result.CAUGHT), (WARNS, Result.MISSED)])
def test_a_fault_that_only_warns_is_unlike_its_twin(
    tmp_path: Path, recorded: Callable[[Path, Path], None], clean: Path, result: Result
) -> None:
    """Where the same run without the fault warns as well, the warning does not tell of the fault."""
    recorded(WARNS, clean)
    tried = [Trial(Kind.FAULT, "importance_weights_are_not_read")]
    for done in (attempt(tried[0], tmp_path), *attempt_together(tried, tmp_path)):
        assert done.result is result
        assert ("without this fault" in done.error) == (result is Result.MISSED)
        assert all(line.startswith(("QUE006", "  ")) for line in done.headline)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_fault_s_headline_is_printed_and_said_to_be_right(process) -> None:
    """``--fault`` prints what ``lineage check`` would of it; exit 0 when it is what the registry says."""
    done = process("selftest", "--fault", "padding_is_never_cleared")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("QUE002 ")
    assert "padding_is_never_cleared: as the registry says, QUE002 at clear, step 2" in done.stdout
    said = json.loads(process("selftest", "--fault", "padding_is_never_cleared", "--json").stdout)
    (trial,) = said["trials"]
    assert (said["ok"], trial["result"], trial["seen"]["QUE002"]["verdict"]) == (True, "caught", "fail")


def test_a_page_that_cannot_be_written_is_said_before_the_work(command, tmp_path: Path) -> None:
    """A whole selftest takes minutes: a folder that is not there, or a page of somebody else's, ends it at once."""
    nowhere, other = tmp_path / "no" / "page.md", tmp_path / "page.md"
    other.write_text("# Mine\n")
    for page, said in ((nowhere, "no folder"), (other, "name a page this command made")):
        done = command("selftest", "--write", page)
        assert (done.code, done.out) == (2, "")
        assert said in done.err


@pytest.mark.slow
def test_ctrl_c_ends_it_and_its_workers() -> None:
    """Exit 130 while workers start, how far it came on stderr, and no worker is left."""
    program = "from lineage.cli import main; main()"
    arguments = [sys.executable, "-c", program, "selftest", "--jobs", "2"]
    running = subprocess.Popen(
        arguments, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            running.wait(20)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    finally:
        running.kill()
    assert (running.returncode, out) == (130, b"")
    assert b"Traceback" not in err
    assert err.startswith(b"interrupted")


def test_the_page_lists_the_faults_of_the_registry() -> None:
    """A fault added, renamed or removed makes the page stale: ``lineage selftest --write docs/selftest.md``."""
    assert sorted(selftest_page.faults_on(PAGE.read_text("utf-8"))) == sorted(all_faults())
