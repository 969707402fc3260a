"""A user's own invariants in SQL: read from a folder, judged like the catalogue's, and apart from it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import synthetic

import lineage
from lineage.checks import Kind
from lineage.checks.catalogue import CatalogueError, available, catalogue
from lineage.cli import main

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "own_checks"
GOOD = ROOT / "traces" / "samples" / "good.parquet"
ROWS = pq.read_metadata(GOOD).num_rows
HEADER = {
    "code": "MYC001",
    "name": "mine",
    "severity": "error",
    "says": "It is so.",
    "needs": "",
    "fields": "",
    "examines": "select count(*) from events",
    "subsumed_by": "",
    "source": "",
    "causes": "",
}
NOTHING = (
    "select rid, null as key, 'a' as expected, 'b' as actual, null as detail, null as severity from events where false"
)
ONE = (
    "select min(rid) as rid, null as key, 'a' as expected, 'b' as actual, null as detail, null as severity from events"
)

Own = Callable[..., Path]


@pytest.fixture
def own(tmp_path: Path) -> Own:
    """Write an invariant file into the folder of one's own; return the folder."""

    def write(body: str = NOTHING, file: str = "mine.sql", **header: str) -> Path:
        folder = tmp_path / "own"
        folder.mkdir(exist_ok=True)
        lines = [f"-- {name}: {value}" for name, value in (HEADER | header).items()]
        (folder / file).write_text("\n".join([*lines, body]), "utf-8")
        return folder

    return write


def judged(folder: Path, *codes: str, trace: Path = GOOD) -> lineage.checks.Report:
    """The report of these codes."""
    return lineage.check(trace, checks=[folder], select=codes or ["MYC"])


# -- SQL files ---------------------------------------------------------------------------------------------------------


def test_an_own_invariant_is_judged_under_its_own_code(own: Own) -> None:
    """It passes, fails with the event completed, and is the headline when it alone fails."""
    assert judged(own()).verdict("MYC001").kind is Kind.PASS
    report = judged(own(ONE))
    verdict = report.verdict("MYC001")
    assert (verdict.kind, verdict.errors, verdict.examined) == (Kind.FAIL, 1, report.rows)
    assert report.headline is not None
    assert (report.headline.invariant.code, report.headline.violation.stage) == ("MYC001", "init")


def test_own_invariants_come_after_the_catalogue_s(own: Own) -> None:
    """The catalogue is judged as ever, and the family of a code is its letters."""
    own(file="b.sql", code="ABCDEFGHIJKL001")
    found = available([own(file="a.sql", code="AAA001"), own(file="a.sql", code="AAA001")])
    assert found[: len(catalogue())] == catalogue()
    assert [(one.code, one.family) for one in found[len(catalogue()) :]] == [
        ("AAA001", "AAA"),
        ("ABCDEFGHIJKL001", "ABCDEFGHIJKL"),
    ]


@pytest.mark.parametrize(("severity", "errors", "warnings"), [("null", 0, 1), ("'error'", 1, 0)])
def test_a_row_s_severity_beats_the_header_s(severity: str, errors: int, warnings: int, own: Own) -> None:
    """As in the catalogue."""
    body = ONE.replace("null as severity", f"{severity} as severity")
    verdict = judged(own(body, severity="warning")).verdict("MYC001")
    assert (verdict.errors, verdict.warnings) == (errors, warnings)


def test_suspects_have_elements(own: Own) -> None:
    """Rows named in ``suspects`` are read element by element."""
    body = (
        "insert into suspects select rid from events where field = 'responses' and op = 'produce';\n"
        "select rid, key, 'none' as expected, valid_length as actual, null as detail, null as severity from elements"
    )
    verdict = judged(own(body)).verdict("MYC001")
    assert verdict.errors > 1
    assert all(one.key and one.actual.isdigit() for one in verdict.violations)


def test_statements_end_where_duckdb_says(own: Own) -> None:
    """Several on a line, comments after the last, a semicolon in a string."""
    body = f"create temp table t as select 'a;b' as x; create macro m() as 1; {ONE} -- ; the end\n;\n/* ; */\n"
    assert judged(own(body)).verdict("MYC001").errors == 1


@pytest.mark.slow
def test_what_an_own_invariant_does_to_the_tables_is_undone(own: Own) -> None:
    """It empties, replaces and adds tables; the next one and the catalogue see what they always see."""
    body = (
        "delete from events where field = 'x'; delete from base; create or replace temp table keys as select 1 as id;\n"
        "create temp table mine as select 1; create table lasting as select 1; create macro two() as 2;\n"
        f"create or replace temp table key_cells as select 1; insert into suspects select rid from events;\n{NOTHING}"
    )
    own(body, "a.sql", code="AAA001")
    counts = "select (select count(*) from base) * (select count(uid) from keys) * (select count(id) from key_cells)"
    tables = "select count(*) from duckdb_tables() where table_name in ('mine', 'lasting', 'own findings')"
    own(NOTHING, "b.sql", code="BBB001", examines=f"{counts} > 0")
    own(NOTHING, "c.sql", code="CCC001", examines=f"select ({tables}) + (select count(*) from suspects)")
    with lineage.open(GOOD) as trace:
        before = {one.code: one.kind for one in lineage.check(trace).verdicts}
        report = lineage.check(trace, checks=[own(NOTHING, "d.sql", code="DDD001")])
        assert {one.code: one.kind for one in lineage.check(trace).verdicts} == before
    kinds = {one.code: one.kind for one in report.verdicts}
    assert {code: kinds[code] for code in before} == before
    assert (kinds["BBB001"], kinds["CCC001"]) == (Kind.PASS, Kind.VACUOUS)


@pytest.mark.parametrize("body", ["select * from made", "select made()"])
def test_nothing_is_left_for_the_next_one(body: str, own: Own) -> None:
    """What one invariant makes does not exist for the next."""
    own(f"create table made as select 1; create macro made() as 1;\n{NOTHING}", "a.sql", code="AAA001")
    with pytest.raises(CatalogueError, match=r"b\.sql: BBB001: Catalog Error: .* made does not exist"):
        judged(own(body, "b.sql", code="BBB001"), "AAA", "BBB")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("header", "body", "said"),
    [
        ({}, "select nope from events", 'Binder Error: Referenced column "nope" not found in FROM clause!'),
        ({}, "selec 1", 'Parser Error: syntax error at or near "selec"'),
        (
            {},
            "select 1 as rid",
            "its last statement must return rid, key, expected, actual, detail, severity; it lacks",
        ),
        ({}, "create table t as select 1", "its last statement must be a query"),
        ({}, "", "its last statement must be a query"),
        ({}, ONE.replace("min(rid)", "max(rid) + 1"), "1 of its rows have a rid that events does not have"),
        ({}, ONE.replace("min(rid)", "any_value(null)"), "1 of its rows have a rid that events does not have"),
        (
            {},
            ONE.replace("null as severity", "'fatal' as severity"),
            "severity 'fatal': expected error, warning or null",
        ),
        (
            {},
            f"drop table base; {NOTHING}",
            "DROP is refused (beside queries: CREATE of a table, view or macro, INSERT",
        ),
        ({}, f"create sequence s; {NOTHING}", "CREATE_SEQUENCE is refused (beside queries: CREATE of a table"),
        ({"examines": "select nope from events"}, NOTHING, 'Binder Error: Referenced column "nope" not found'),
        ({"examines": "select 'many'"}, NOTHING, "examines must be a query for one number"),
        ({"examines": "select n from events"}, NOTHING, "examines must be a query for one number"),
        ({"examines": ""}, NOTHING, "expected a query"),
    ],
)
def test_an_invariant_that_cannot_be_run_is_one_line(header: dict[str, str], body: str, said: str, own: Own) -> None:
    """The line names the file and the code, and says what is wrong."""
    folder = own(body, **header)
    with pytest.raises(CatalogueError) as caught:
        judged(folder)
    assert str(caught.value).startswith(f"{folder}/mine.sql: MYC001: {said}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"code": "my1"}, "mine.sql: code 'my1': expected 3 to 12 capital letters and 3 digits, as in TEAM001"),
        ({"code": "KEY001"}, "mine.sql: the code KEY001 is taken by lineage's own KEY001.sql; choose another"),
        ({"severity": "fatal"}, "mine.sql: severity 'fatal': expected error or warning"),
        ({"needs": "mask_sums"}, "mine.sql: needs mask_sums: no such column; did you mean mask_sum?"),
        ({"subsumed_by": "KEY01"}, "mine.sql: subsumed_by: no invariant 'KEY01'; did you mean KEY001?"),
        ({"extra": "x"}, "mine.sql: no header 'extra'; known: code, name"),
    ],
)
def test_a_header_that_cannot_be_is_one_line(header: dict[str, str], said: str, own: Own) -> None:
    """The line names the file, what is wrong and what was expected."""
    folder = own(**header)
    with pytest.raises(CatalogueError) as caught:
        available([folder])
    assert str(caught.value).startswith(f"{folder}/{said}")


def test_a_header_line_that_lacks_is_named(own: Own) -> None:
    """So is the form it has."""
    folder = own()
    (folder / "mine.sql").write_text("-- code: MYC001\nselect 1")
    with pytest.raises(CatalogueError, match=r"mine\.sql: header lacks name, severity, .* \(lines such as: -- name: "):
        available([folder])


def test_two_files_of_one_code_are_both_named(own: Own) -> None:
    """Neither wins."""
    own(file="a.sql")
    folder = own(file="b.sql")
    with pytest.raises(CatalogueError) as caught:
        available([folder])
    assert str(caught.value) == f"{folder}/b.sql: the code MYC001 is taken by {folder}/a.sql; choose another"


def test_a_folder_that_is_none_is_one_line(tmp_path: Path, own: Own) -> None:
    """Missing, empty, a file, not UTF-8: each says which."""
    folder = own()
    (folder / "latin.sql").write_bytes(b"-- code: \xe9")
    (tmp_path / "empty").mkdir()
    for path, said in (
        (tmp_path / "none", f"checks {tmp_path}/none: no such folder"),
        (tmp_path / "empty", f"checks {tmp_path}/empty: no .sql file in it"),
        (folder / "mine.sql", f"checks {folder}/mine.sql: is a file; give the folder it lies in"),
        (folder, f"{folder}/latin.sql: not UTF-8 (byte 9)"),
    ):
        with pytest.raises(CatalogueError) as caught:
            available([path])
        assert str(caught.value) == said


def test_a_file_that_cannot_be_read_is_one_line(own: Own) -> None:
    """A folder by a file's name stands for what cannot be opened, whoever runs the test."""
    folder = own()
    (folder / "odd.sql").mkdir()
    with pytest.raises(CatalogueError, match=r"odd\.sql: cannot be read: Is a directory"):
        available([folder])


# -- the example, and the command line ---------------------------------------------------------------------------------


def test_the_example_s_checks_pass_on_the_good_sample() -> None:
    """Each of them saw something."""
    report = lineage.check(GOOD, checks=[EXAMPLE / "checks"], select=["TEAM"])
    assert {one.code: one.kind for one in report.verdicts} == {"TEAM001": Kind.PASS, "TEAM002": Kind.PASS}


def test_the_example_s_checks_catch_what_they_say(rows: list[synthetic.Row], write: Callable[..., Path]) -> None:
    """A reward over one and a log-prob that is too short are named by trajectory."""
    reward = next(row for row in rows if row.field == "rm_scores" and row.op == "produce")
    reward.lists["sum"] = [3.5, *reward.lists["sum"][1:]]
    short = next(row for row in rows if row.field == "old_log_probs" and row.op == "produce")
    short.lists["valid_length"] = [short.lists["valid_length"][0] - 1, *short.lists["valid_length"][1:]]
    report = lineage.check(write(rows), checks=[EXAMPLE / "checks"], select=["TEAM"])
    said = {one.code: (one.errors, one.warnings, one.violations[0].key) for one in report.verdicts}
    assert said == {"TEAM001": (1, 0, reward.lists["key"][0]), "TEAM002": (0, 1, short.lists["key"][0])}


def test_the_page_shows_the_example(tmp_path: Path) -> None:
    """The SQL of docs/checks/own.md is the file's, and its Python makes the invariant the package makes."""
    page = (ROOT / "docs" / "checks" / "own.md").read_text("utf-8")
    assert f"```sql\n{(EXAMPLE / 'checks' / 'TEAM001.sql').read_text('utf-8')}```" in page
    shown: dict[str, object] = {}
    exec(page.split("```python\n")[1].split("```")[0], shown)
    packaged: dict[str, object] = {}
    exec((EXAMPLE / "plugin" / "team_checks.py").read_text("utf-8"), packaged)
    (one,), (other,) = shown["lineage_invariants"](), packaged["lineage_invariants"]()  # type: ignore[operator]
    assert (one.code, one.says, one.examines, one.needs) == (other.code, other.says, other.examines, other.needs)


@pytest.mark.slow
def test_own_codes_are_known_to_every_option(
    own: Own, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--select, --ignore, --require and a baseline take them; the settings file names the folder."""
    folder = own(ONE)

    def check(*options: str) -> int:
        monkeypatch.setattr(sys, "argv", ["lineage", "check", str(GOOD), *options])
        with pytest.raises(SystemExit) as caught:
            main()
        return int(caught.value.code or 0)

    mine = ("--checks", str(folder), "--select", "MYC,TOP003")
    baseline = ("--baseline", str(tmp_path / "baseline.json"))
    assert check(*mine, "--require", f"MYC001={ROWS}") == 1
    assert check(*mine, "--max-violations", "MYC001=1", "--require", f"MYC001={ROWS}") == 0
    assert check(*mine, "--ignore", "MYC001") == 0
    assert check(*mine, *baseline, "--update-baseline") == 0
    assert check(*mine, *baseline) == 0
    settings = tmp_path / "lineage.toml"
    settings.write_text('checks = ["own"]\nselect = ["MYC001"]\n')
    capsys.readouterr()
    assert check("--config", str(settings)) == 1
    assert capsys.readouterr().out.startswith("MYC001 mine: first broken at step 0, stage init\n")
