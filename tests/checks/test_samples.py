"""The samples that ship with the checker: the good one is clean, each bad one is blamed on its own fault."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

_SCRIPTS = Path(__file__).parents[2] / "scripts"
if str(_SCRIPTS) not in sys.path:
    sys.path.insert(0, str(_SCRIPTS))

from make_samples import SAMPLES, path_of, shrink  # noqa: E402

from lineage.checks import Kind, check  # noqa: E402
from lineage.checks.catalogue import catalogue  # noqa: E402
from lineage.cli.together import TOGETHER, Place, judged_together  # noqa: E402
from lineage.schema import COLUMNS  # noqa: E402
from lineage.traces import TraceError, open_trace  # noqa: E402
from lineage.trainer.faults.lab import record  # noqa: E402
from lineage.trainer.faults.registry import Fault, find_fault  # noqa: E402

CODES = [one.code for one in catalogue()]
PADDED = ("PAD001", "PAD002", "BAT001", "KEY003")
QUICK = ("KEY002", "MSK002", "TOK001")
FILES = [path_of(None), *map(path_of, CODES)]
MACHINE_PATH = re.compile(r"""(?:^|[\s"'=:(])(?:/(?:home|root|tmp|work|usr|opt|var|mnt|private|Users)/|[A-Z]:\\)""")


def dozens() -> Iterator[list[str]]:
    """A dozen codes at a time, of samples that can be judged together: they follow one profile."""
    alike: dict[str, list[str]] = {}
    for code in CODES:
        run = json.loads(pq.read_metadata(path_of(code)).metadata[b"lineage.run"])
        alike.setdefault(run["profile"], []).append(code)
    for codes in alike.values():
        yield from (codes[at : at + TOGETHER] for at in range(0, len(codes), TOGETHER))


def made_with(code: str) -> Fault:
    """The fault that the sample of a code says it has in it."""
    with open_trace(path_of(code)) as trace:
        return find_fault(trace.metadata["run"]["fault"]["name"])


def test_every_code_has_a_sample():
    """A code without a bad sample is a code nobody has seen fail on a real run; a file without a code is stale."""
    assert sorted(SAMPLES.rglob("*.parquet")) == sorted(FILES)


def test_the_good_sample_is_clean():
    """It is complete and it pads: no code fails, and those that do not pass had nothing to look at."""
    report = check(path_of(None))
    kinds = {verdict.code: verdict.kind for verdict in report.verdicts}
    assert set(kinds.values()) <= {Kind.PASS, Kind.VACUOUS, Kind.NOT_APPLICABLE}
    assert {code: kinds[code] for code in PADDED} == dict.fromkeys(PADDED, Kind.PASS)
    assert (report.exit_code, report.state, report.steps) == (0, "", 2)


@pytest.mark.parametrize("code", QUICK)
def test_a_bad_sample_is_blamed_on_its_fault(code):
    """The report leads with the fault's code, in the stage and the step where the fault was made."""
    fault = made_with(code)
    report = check(path_of(code))
    assert report.headline is not None
    violation = report.headline.violation
    assert report.headline.invariant.code == fault.code == code
    assert (violation.stage, violation.global_steps) == (fault.stage, fault.step)
    assert violation.expected != violation.actual
    assert (report.exit_code, report.state) == (1, "")


@pytest.mark.slow
@pytest.mark.parametrize("codes", list(dozens()), ids="-".join)
def test_every_bad_sample_is_blamed_on_its_fault(codes, tmp_path):
    """The same of all of them, a dozen at once; of a code that only warns its warning is where the fault was made."""
    for code in codes:
        shutil.copy(path_of(code), tmp_path)
    found = judged_together(tmp_path, codes)
    blamed = {code: one.blamed or next(one for one in one.warned if one.code == code) for code, one in found.items()}
    faults = map(made_with, codes)
    assert blamed == {code: Place(one.code, one.stage, one.step) for code, one in zip(codes, faults, strict=True)}


@pytest.mark.parametrize("code", CODES)
@pytest.mark.slow
def test_a_bad_sample_says_what_was_done_to_it(code):
    """The metadata of the file names the fault, as the registry does now."""
    with open_trace(path_of(code)) as trace:
        run = trace.metadata["run"]
    fault = made_with(code)
    assert run["run_id"] == code
    assert run["fault"] == {"code": fault.code, "name": fault.name, "stage": fault.stage, "says": fault.says}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_sample_is_small_and_says_nothing_of_the_machine(path):
    """Under 80 kB, and no absolute path in its metadata or its columns."""
    assert path.stat().st_size < 80_000
    table = pq.read_table(path)
    metadata = pq.read_metadata(path).metadata
    texts = [value.decode() for key, value in metadata.items() if key != b"ARROW:schema"]
    texts += [text for column in table.columns for text in _strings(column)]
    assert len(texts) > 100
    assert [text for text in texts if MACHINE_PATH.search(text)] == []


@pytest.mark.slow
@pytest.mark.parametrize("column", [column.name for column in COLUMNS])
def test_a_trace_without_a_column_is_no_failure(column, tmp_path):
    """What cannot be seen is never a violation nor a traceback; a file that cannot name its rows is no trace."""
    table = pq.read_table(path_of(None))
    path = tmp_path / "lacking.parquet"
    pq.write_table(table.drop_columns([column]), path)
    if column in ("global_steps", "stage", "op", "field"):
        with pytest.raises(TraceError, match=f"not a lineage trace \\(no column {column}\\)"):
            check(path)
        return
    kinds = {verdict.code: verdict.kind for verdict in check(path).verdicts}
    assert [code for code, kind in kinds.items() if kind is Kind.FAIL] == []


@pytest.mark.slow
def test_making_a_sample_again_gives_the_same_bytes(tmp_path):
    """On one machine a sample is a function of the code: clock, run id and revision are fixed."""
    fault = find_fault("late_writer")
    first, second = (record(tmp_path / folder / "QUE001.parquet", fault) for folder in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()


def test_a_sample_is_made_small_without_touching_its_rows(tmp_path):
    """Far fewer bytes, the same rows, the same metadata."""
    table = pq.read_table(path_of(None))
    path = tmp_path / "trace.parquet"
    with pq.ParquetWriter(path, table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({"lineage.run": "{}"})
    before = path.stat().st_size
    shrink(path)
    assert path.stat().st_size < 0.6 * before
    assert pq.read_table(path).equals(table)
    assert pq.read_metadata(path).metadata[b"lineage.run"] == b"{}"


def _strings(column: pa.ChunkedArray) -> list[str]:
    """Every string of a column, however deep it lies."""
    found: list[str] = []
    _collect(column.to_pylist(), found)
    return found


def _collect(value: object, found: list[str]) -> None:
    if isinstance(value, str):
        found.append(value)
    elif isinstance(value, list | tuple):
        for one in value:
            _collect(one, found)
    elif isinstance(value, dict):
        for one in value.values():
            _collect(one, found)
