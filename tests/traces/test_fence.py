"""The fence: whatever SQL is given, at either door, it reads this trace, writes nothing and reaches nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest

from lineage.checks.catalogue import CatalogueError, parse
from lineage.checks.own import accuse
from lineage.checks.profiles import load
from lineage.checks.workbench import Workbench
from lineage.traces import Trace, TraceError, open_trace

WORD = "BYSTANDER"
secret_frame = pd.DataFrame({"word": [WORD]})

COPY = "copy (select 2 as x) to '{trace}' (use_tmp_file false)"
SERIALIZED = (
    "json_execute_serialized_sql(json_serialize_sql("
    "'with t as (copy (select 2 as x) to ''{trace}'' (use_tmp_file false)) select 1'))"
)
ATTACKS = {
    "overwrites the trace": COPY,
    "overwrites the trace, after a comment": f"/* select */ -- x\n{COPY}",
    "overwrites the folder": "copy (select 1 as x) to '{folder}' (format parquet, partition_by (x), overwrite)",
    "overwrites the trace in a with": f"with t as ({COPY}) select * from t",
    "overwrites the trace in a with beside a query": f"with t as materialized ({COPY}) select 1",
    "overwrites the trace in a nested with": f"select * from (with t as ({COPY}) select * from t)",
    "overwrites the trace while pivoting": f"with t as ({COPY}) pivot events on stage using count(*)",
    "overwrites the trace while explained": f"explain analyze {COPY}",
    "overwrites the trace by a prepared statement": f"prepare p as {COPY}; execute p",
    "overwrites the trace by the query function": "select * from query('copy (select 1) to ''{trace}''')",
    "overwrites the trace by serialized SQL": f"select * from {SERIALIZED}",
    "overwrites the trace by serialized SQL in a query": (
        "select * from query('select * from json_exec' || 'ute_serialized_sql(json_serialize_sql(''with t as "
        "(copy (select 2 as x) to {trace} (use_tmp_file false)) select 1''))')"
    ),
    "runs serialized SQL": "select * from json_execute_serialized_sql(json_serialize_sql('select 1'))",
    "overwrites the trace after a query": f"select 1; {COPY}",
    "writes a file": "copy (select 1) to '{folder}/made.csv'",
    "writes a file in a with": "with t as (copy (select 1) to '{folder}/made.csv') select 1",
    "exports the database": "export database '{folder}/made'",
    "imports a database": "import database '{folder}'",
    "attaches a file": "attach '{folder}/made.db'",
    "attaches a database in memory": "attach ':memory:' as other",
    "detaches": "detach memory",
    "copies a database": "copy from database memory to temp",
    "installs an extension": "install httpfs",
    "loads an extension": "load httpfs",
    "updates extensions": "update extensions",
    "opens the fence": "set enable_external_access = true",
    "adds a path": "set allowed_paths = ['{secret}']",
    "resets a setting": "reset allowed_paths",
    "unlocks": "set lock_configuration = false",
    "sets a variable": "set variable x = 1",
    "uses another schema": "use memory.main",
    "profiles into a file": "pragma enable_profiling = 'json'",
    "profiles by a function": "select * from enable_profiling(save_location = '{folder}/made.json')",
    "sets the profile's file": "set profile_output = '{folder}/made.json'",
    "logs into a folder": "call enable_logging('QueryLog', storage = 'file', storage_path = '{folder}')",
    "logs by a function": "select * from enable_logging(storage = 'file', storage_path = '{folder}')",
    "makes a secret": "create secret s (type http, bearer_token 'x')",
    "makes a lasting secret": "create persistent secret s (type http, bearer_token 'x')",
    "lists secrets": "select * from duckdb_secrets()",
    "checkpoints": "checkpoint",
    "vacuums": "vacuum",
    "commits": "commit",
    "begins": "begin",
    "calls": "call pragma_version()",
    "drops the trace": "drop view rows",
    "alters": "alter view rows rename to others",
    "comments": "comment on view rows is 'x'",
    "makes a schema": "create schema s",
    "makes a type": "create type mood as enum ('x')",
    "makes a sequence": "create sequence q",
    "reads text": "select * from read_text('{secret}')",
    "reads bytes": "select * from read_blob('{secret}')",
    "reads csv": "select * from read_csv('{secret}')",
    "reads json": "select * from read_json('{secret}')",
    "sniffs": "select * from sniff_csv('{secret}')",
    "reads a file by its name": "from '{secret}'",
    "reads a file beside it": "from 'secret.csv'",
    "reads past the trace's path": "select * from read_text('{trace}/../secret.csv')",
    "reads parquet besides": "select * from read_parquet(['{trace}', '{secret}'])",
    "reads another file's metadata": "select * from parquet_metadata('{secret}')",
    "reads another file's schema": "select * from parquet_schema('{secret}')",
    "lists a folder": "select * from glob('{folder}/*')",
    "reads the spill folder": "select * from read_text('.tmp/secret.csv')",
    "reads its environment": "select * from read_text('/proc/self/environ')",
    "asks for an environment variable": "select getenv('HOME')",
    "reads standard input": "select * from read_csv('/dev/stdin')",
    "reads a variable of the caller": "select * from secret_frame",
    "reads a URL": "from 'https://example.invalid/x.parquet'",
    "reads a bucket": "select * from read_parquet('s3://bucket/x.parquet')",
    "asks an extension": "select * from sqlite_scan('{secret}', 't')",
    "reads in a macro": "create macro leak() as table select * from read_text('{secret}'); select * from leak()",
    "reads into a table": "create table leak as select * from read_text('{secret}')",
    "reads a database": "select * from read_duckdb('{secret}')",
    "lists extensions": "select * from duckdb_extensions()",
}
# They need a table, or say nothing of use at one door.
ATTACKS_ON_TABLES = {
    "overwrites the trace while it makes a table": f"create temp table z as with t as ({COPY}) select * from t",
    "overwrites the trace while it inserts": f"with t as ({COPY}) insert into suspects select 1",
    "overwrites the trace from an insert": f"insert into suspects with t as ({COPY}) select x from t",
    "overwrites the trace while it deletes": f"with t as ({COPY}) delete from suspects",
    "overwrites the trace while it updates": f"with t as ({COPY}) update suspects set rid = 2",
    "overwrites the trace from a view": f"create temp view v as with t as ({COPY}) select * from t; select * from v",
    "overwrites the trace from a macro": f"create macro v() as table with t as ({COPY}) select * from t; from v()",
    "overwrites the trace from a function that ours call": (
        f"create macro count_star() as (select * from {SERIALIZED}); select count(*) from events"
    ),
    "makes a secret behind a nested comment": "/* /* */ create temp table */ create secret s (type http)",
    "reads into suspects": "insert into suspects select length(content) from read_text('{secret}')",
    "reads while it deletes": "delete from events where rid in (select size from read_blob('{secret}'))",
}
HEADER = """\
-- code: OWN001
-- name: mine
-- severity: error
-- says: x
-- needs:
-- fields:
-- examines: {examines}
-- subsumed_by:
-- source:
-- causes:
"""
COUNT = "select count(*) from events"
NOTHING = (
    "select rid, null as key, '' as expected, '' as actual, null as detail, null as severity from events where false"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, trace_file: Path) -> Iterator[Path]:
    """A folder to stand in: a trace, and a file that no query may read, also where DuckDB would spill to."""
    folder = tmp_path_factory.mktemp("fence")
    (folder / ".tmp").mkdir()
    for where in (folder, folder / ".tmp"):
        (where / "secret.csv").write_text(f"word\n{WORD}\n")
    shutil.copy(trace_file, folder / "trace.parquet")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def trace(folder: Path) -> Iterator[Trace]:
    """The trace, opened once: an attack leaves nothing behind that the next one could trip over."""
    with open_trace("trace.parquet") as opened:
        yield opened


@pytest.fixture(scope="module")
def bench(folder: Path) -> Iterator[Workbench]:
    """The checker's tables of the same trace."""
    with open_trace("trace.parquet", views=False) as opened:
        yield Workbench(opened, load(opened.profile))


def _filled(attack: str, folder: Path) -> str:
    names = {"trace": folder / "trace.parquet", "secret": folder / "secret.csv", "folder": folder}
    for name, path in names.items():
        attack = attack.replace(f"{{{name}}}", str(path))
    return attack


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _judge(bench: Workbench, body: str, examines: str = COUNT) -> pa.Table:
    one = replace(parse(HEADER.format(examines=examines) + body, "mine.sql"), origin="mine.sql")
    return accuse(bench, one)[1]


def _refused(folder: Path, error: type[Exception], do: Callable[[], object]) -> str:
    """What is said when it is refused, in one line, with nothing written."""
    before = _contents(folder)
    with pytest.raises(error) as caught:
        do()
    said = str(caught.value)
    assert "\n" not in said
    assert WORD not in said
    assert _contents(folder) == before
    return said


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_a_query_that_does_more_than_read_its_trace_is_refused(attack: str, folder: Path, trace: Trace) -> None:
    """One line; the trace and what lies beside it are as before, and the trace answers as before."""
    _refused(folder, TraceError, lambda: trace.fetch(_filled(attack, folder)))
    assert trace.fetch("select count(*) > 0 from rows")[1] == [(True,)]


@pytest.mark.slow
@pytest.mark.parametrize("attack", [*ATTACKS.values(), *ATTACKS_ON_TABLES.values()], ids=[*ATTACKS, *ATTACKS_ON_TABLES])
def test_a_check_that_does_more_than_read_its_trace_is_refused(attack: str, folder: Path, bench: Workbench) -> None:
    """Likewise for a user's invariant, whose line names its file and code; one that behaves is judged after it."""
    body = f"{_filled(attack, folder)};\n{NOTHING}"
    said = _refused(folder, CatalogueError, lambda: _judge(bench, body))
    assert said.startswith("mine.sql: OWN001: ")
    assert _judge(bench, NOTHING).num_rows == 0


def test_functions_that_a_check_makes_are_none_of_ours(bench: Workbench) -> None:
    """A macro by the name of an aggregate is the check's own affair: it does not run in the queries of the checker."""
    three = NOTHING.replace("false", "rid < 3")
    assert _judge(bench, f"create macro count_star() as 42; {three}").num_rows == 3
    assert bench.number("select count(*) from violations") == 3


@pytest.mark.parametrize("name", ["overwrites the trace", "overwrites the trace in a with", "reads text"])
def test_what_a_check_examines_is_fenced_too(name: str, folder: Path, bench: Workbench) -> None:
    """The query of the header is no way round the fence."""
    examines = _filled(ATTACKS[name], folder)
    assert _refused(folder, CatalogueError, lambda: _judge(bench, NOTHING, examines)).startswith("mine.sql: OWN001: ")


@pytest.mark.parametrize("name", ["overwrites the trace in a with", "reads text", "reads a variable of the caller"])
def test_the_last_statement_of_a_check_is_fenced_too(name: str, folder: Path, bench: Workbench) -> None:
    """The query that names violations is no way round the fence either."""
    _refused(folder, CatalogueError, lambda: _judge(bench, _filled(ATTACKS[name], folder)))


def _checks(folder: Path, body: str) -> Path:
    (folder / "mine.sql").write_text(HEADER.format(examines=COUNT) + body)
    return folder


@pytest.mark.slow
def test_the_command_line_refuses_in_one_line(folder: Path, tmp_path: Path) -> None:
    """Exit code 2, one line on stderr, at both doors."""
    checks = _checks(tmp_path, f"select * from read_text('{folder}/secret.csv');\n{NOTHING}")
    before = _contents(folder)
    for arguments, start, end in (
        (["sql", "trace.parquet", "drop view rows"], "error: sql: DROP is refused", "no other file"),
        (["sql", "trace.parquet", _filled(ATTACKS["overwrites the trace in a with"], folder)], "error: sql: ", ""),
        (["check", "trace.parquet", "--checks", str(checks)], f"error: {checks}/mine.sql: OWN001: ", "no other file"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "lineage.cli", *arguments], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(start)
        assert done.stderr.endswith(f"{end}\n")
        assert done.stderr.count("\n") == 1
    assert _contents(folder) == before


@pytest.mark.parametrize(
    "query",
    [
        "-- how many\nselect count(*) from rows -- rows\n;",
        "from rows",
        "(select 1)",
        "values (1)",
        "describe rows",
        "show tables",
        "summarize select n from rows",
        "with t as (select stage from rows) select * from t order by stage",
        "select stage, n from rows order by n desc limit 3",
        "pivot rows on stage in ('rollout', 'reward') using count(*) group by op",
        "select 'copy (select 1) to ''x''' as said, 'insert' as \"copy\"",
        "from query('select 1')",
        "select count(*) from duckdb_views()",
        "select * from range(3), unnest([1, 2])",
        "select s.n, r.range from rows as s, lateral (select * from range(s.n)) as r limit 2",
    ],
)
def test_what_reads_is_run(query: str, trace: Trace) -> None:
    """Every way to ask is there; words that write are no matter where they do not."""
    names, rows = trace.fetch(query)
    assert names
    assert rows
    assert len(trace.df(query)) == len(rows)


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("", "sql: expected a query"),
        ("-- nothing", "sql: expected a query"),
        ("select 1; select 2", "sql: expected one query, found 2 statements"),
        ("pivot rows on stage using count(*)", "sql: a PIVOT must name its columns here"),
        ("drop view rows", "sql: DROP is refused; a query reads this trace and no other file"),
    ],
)
def test_what_is_no_query_is_said_to_be_none(query: str, said: str, trace: Trace) -> None:
    """The line says what was expected."""
    with pytest.raises(TraceError) as caught:
        trace.fetch(query)
    assert str(caught.value).startswith(said)


@pytest.mark.slow
def test_what_does_not_fit_in_memory_spills_to_a_folder_that_goes_away(folder: Path) -> None:
    """The folder is none that was there before, and nothing of it is left."""
    with open_trace("trace.parquet", memory_limit="60MB", threads=1) as trace:
        spill = Path(trace.fetch("select current_setting('temp_directory')")[1][0][0])
        assert not spill.exists()
        query = "select count(*) from (select range, hash(range) as h from range(6000000) order by h, range)"
        assert trace.fetch(query)[1] == [(6000000,)]
    assert not spill.exists()
    assert sorted(path.name for path in folder.iterdir()) == [".tmp", "secret.csv", "trace.parquet"]


@pytest.mark.slow
@pytest.mark.parametrize("door", ["sql", "check"])
def test_ctrl_c_ends_a_query_that_would_not_end(door: str, folder: Path, tmp_path: Path) -> None:
    """Exit code 130 and nothing said, at both doors."""
    endless = "select count(*) from range(100000000) a, range(100000000) b where a.range * b.range % 7 = 3"
    checks = _checks(tmp_path, f"create temp table t as {endless};\n{NOTHING}")
    arguments = (
        ["sql", "trace.parquet", endless] if door == "sql" else ["check", "trace.parquet", "--checks", str(checks)]
    )
    program = (
        "import os, signal, sys, threading\n"
        "import duckdb\n"
        "from lineage.cli import main\n"
        "from lineage.traces import fence\n"
        "asked = fence._admit\n"
        "def admit(con, statement, *rest):\n"
        "    asked(con, statement, *rest)\n"
        "    if 'range(' in statement.sql:\n"
        "        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"
        "fence._admit = admit\n"
        f"sys.argv[1:] = {arguments!r}\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
