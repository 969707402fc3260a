"""Write the pages that are made from the code, so that they cannot part from it.

    python scripts/make_docs.py [--check]

``docs/schema.md`` comes from ``lineage.schema`` and ``lineage.vocabulary``; ``docs/checks/<CODE>.md`` and the tables of
sources and codes in ``docs/checks/README.md`` from the invariant catalogue and the faults; ``docs/cli.md`` from the
Typer application, by Typer; the files shown in ``docs/ci.md`` from the templates of ``lineage init-ci``; each
``console`` block of ``README.md`` from running its command. ``--check`` writes nothing and exits 1 when a page is
stale; the seconds a command prints are not compared.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lineage import schema, vocabulary  # noqa: E402
from lineage.checks.catalogue import Invariant, catalogue  # noqa: E402
from lineage.checks.sources import SOURCES  # noqa: E402
from lineage.cli.exit_codes import JUDGES  # noqa: E402
from lineage.cli.explain import LOOKS_AT, WARNS  # noqa: E402
from lineage.trainer.faults.registry import all_faults  # noqa: E402

GROUPS: tuple[tuple[str, tuple[schema.Column, ...]], ...] = (
    ("Who and when", schema.WHO_WHEN),
    ("Where", schema.WHERE),
    ("What", schema.WHAT),
    ("Per element: identity and tags", schema.IDENTITY),
    ("Per element: content", schema.CONTENT),
    ("Per element: pairs (op `compare`)", schema.PAIRS),
    ("Asked and got", schema.ASKED),
    ("Context", schema.CONTEXT),
)
METADATA = (
    (schema.META_VERSION, "schema version, a decimal string"),
    (schema.META_RUN, "run id, profile, versions, seed, hashes of model, tokenizer and config, git revision"),
    (schema.META_CONFIG, "the resolved configuration"),
    (schema.META_STATE, "closed, steps sealed, steps torn, what was dropped and why"),
    (schema.META_SEGMENT, "where a trace takes several files: this one's number, how many there are, their plan"),
)
#: what the program, or a library it calls, reads from the environment
ENVIRONMENT = (
    ("LINEAGE_DISABLED", "any value but `0` makes every verb of the recorder a no-op"),
    ("LINEAGE_NO_PLUGINS", "any value but `0` leaves out the invariants of installed plugins"),
    (
        "LINEAGE_FAULT",
        "set by `lineage selftest --mode ray` for the processes of a run: the fault each injects",
    ),
    ("GITHUB_STEP_SUMMARY", "file that `--format github` appends what GitHub would cut off to; set by GitHub"),
    ("NO_COLOR", "no colour in a terminal; a pipe never gets any"),
    ("COLUMNS", "width of help and tables"),
    ("XDG_CACHE_HOME", "where made models are kept (`~/.cache` when unset); read by `lineage run`"),
    ("HF_HUB_OFFLINE", "set to `1` by `lineage run` unless it is set: no hub is asked"),
    ("TOKENIZERS_PARALLELISM", "set to `false` by `lineage run` unless it is set"),
    ("HF_HUB_DISABLE_PROGRESS_BARS", "set to `1` by `lineage run` unless it is set"),
    ("TENSORBOARD_DIR", "event files of `trainer.logger=tensorboard`; `tensorboard` in the run folder when unset"),
    ("WANDB_MODE", "mode of `trainer.logger=wandb`; `offline` when neither it nor the key is set"),
    ("WANDB_API_KEY", "lets `trainer.logger=wandb` upload, unless `WANDB_MODE` says otherwise"),
    ("WANDB_ENTITY", "who owns the run of `trainer.logger=wandb`"),
    ("WANDB_ERROR_REPORTING", "set to `false` by `trainer.logger=wandb` unless it is set"),
    ("MLFLOW_TRACKING_URI", "where `trainer.logger=mlflow` logs; `mlruns` in the run folder when unset"),
    ("MLFLOW_ALLOW_FILE_STORE", "set to `true` by `trainer.logger=mlflow` unless it is set"),
    ("MLFLOW_DISABLE_TELEMETRY", "set to `true` by `trainer.logger=mlflow` unless it is set"),
    ("TRACKIO_DIR", "database of `trainer.logger=trackio`; `trackio` in the run folder when unset"),
)
#: a page of GitHub by what names it in a report's reference
_PAGES = {"#": "issues", "@": "commit"}
_REFERENCE = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?P<mark>[#@])(?P<what>\w+)")
CONSOLE = re.compile(r"(?<=^```console\n)\$ lineage (?P<arguments>.*)\n(?P<output>(?s:.*?))(?=^```$)", re.M)
_CODES = re.compile(r"(?<=<!-- codes: made by scripts/make_docs.py -->\n).*(?=<!-- end of codes -->)", re.S)
_SOURCES = re.compile(r"(?<=<!-- sources: made by scripts/make_docs.py -->\n).*(?=<!-- end of sources -->)", re.S)
_FILE = re.compile(r"(?P<head>^<!-- file: (?P<path>\S+) -->\n```\w+\n)(?s:.*?)(?=^```$)", re.M)
_SECONDS = re.compile(r" in \d+\.\d+ s$", re.M)


def pages() -> dict[Path, str]:
    """Every made page and its text."""
    made = {ROOT / "docs" / "schema.md": schema_page()}
    for one in catalogue():
        made[ROOT / "docs" / "checks" / f"{one.code}.md"] = code_page(one)
    index = ROOT / "docs" / "checks" / "README.md"
    made[index] = _SOURCES.sub(lambda _: sources_table(), _CODES.sub(lambda _: codes_table(), index.read_text("utf-8")))
    made[ROOT / "docs" / "cli.md"] = cli_page()
    gates = ROOT / "docs" / "ci.md"
    made[gates] = with_files(gates.read_text("utf-8"))
    readme = ROOT / "README.md"
    made[readme] = with_outputs(readme.read_text("utf-8"))
    return made


def schema_page() -> str:
    """The reference of every column, by group, and the words their values are taken from."""
    parts = [
        "<!-- made by scripts/make_docs.py from lineage/schema.py and lineage/vocabulary.py -->",
        f"# Trace schema, version {schema.SCHEMA_VERSION}\n",
        "One row is one (run, step, stage, op, field, process, mini-batch, micro-batch). Columns *per element* are",
        "lists of one length `n`; their type is that of one element. What the rows mean is in [trace.md](trace.md).\n",
    ]
    for title, columns in GROUPS:
        head = ("column", "type", "meaning", "unit or values", "null means")
        body = [
            (f"`{one.name}`", words(one.type), one.meaning, _unit(one.unit), one.null or "never") for one in columns
        ]
        parts += [f"## {title}\n", *table(head, body), ""]
    parts += ["## File metadata\n", "Parquet key-value pairs. Each value is JSON, but for the version.\n"]
    parts += [*table(("key", "holds"), [(f"`{key.decode()}`", holds) for key, holds in METADATA]), ""]
    parts += ["## Words\n"]
    lists = {
        "stages": vocabulary.STAGES,
        "ops": vocabulary.OPS,
        "entities": vocabulary.ENTITIES,
        "spans": vocabulary.SPANS,
        "containers": vocabulary.CONTAINERS,
        "layouts": vocabulary.LAYOUTS,
        "statuses": vocabulary.STATUSES,
    }
    parts += [f"- {name}: {' '.join(f'`{word}`' for word in values)}" for name, values in lists.items()]
    parts += ["", "Fields the reference step knows; any other name is legal.\n"]
    fields = [
        (f"`{one.name}`", one.span, one.produced_in, " ".join(one.consumed_in), one.role)
        for one in vocabulary.FIELDS.values()
    ]
    parts += table(("field", "span", "produced in", "read in", "role"), fields)
    return "\n".join(parts) + "\n"


def code_page(one: Invariant) -> str:
    """What one code enforces, needs and usually finds."""
    folds = ", ".join(f"[{code}]({code}.md)" for code in one.subsumed_by)
    sample = f"traces/samples/bad/{one.code}.parquet"
    facts = [
        ("severity", f"{one.severity}: {WARNS}" if one.severity == "warning" else one.severity),
        ("needs columns", " ".join(f"`{name}`" for name in one.needs) or "none"),
        ("needs fields", " ".join(f"`{name}`" for name in one.fields) or "none"),
        ("folds under", folds or "nothing"),
        ("looks at", LOOKS_AT[one.looks]),
        *([("backs up", one.backs_up)] if one.backs_up else []),
        ("comes from", f"{one.source} ([sources](README.md#sources))"),
        ("query", f"[checks/invariants/{one.code}.sql](../../checks/invariants/{one.code}.sql)"),
    ]
    if (ROOT / sample).exists():
        facts.append(("a trace that breaks it", f"[{sample}](../../{sample})" + _exits(one)))
    return "\n".join(
        [
            f"<!-- made by scripts/make_docs.py from checks/invariants/{one.code}.sql -->",
            f"# {one.code}: {one.name}\n",
            f"{one.says}\n",
            f"Usually broken by: {one.causes}\n",
            *table(("", ""), facts),
            "",
            *_shown_by(one),
            *_would_have_caught(one),
        ]
    )


def _exits(one: Invariant) -> str:
    """What a check of the sample ends with, where that is not 1."""
    return ": warns, exit code 0" if one.severity == "warning" else ""


def _shown_by(one: Invariant) -> Iterator[str]:
    """The faults it catches."""
    if one.faults:
        faults = all_faults()
        yield "## Faults that show it\n"
        yield "`lineage selftest --fault NAME` makes one and prints what this code says of it.\n"
        body = [(f"`{name}`", faults[name].stage, faults[name].says) for name in one.faults if name in faults]
        yield from (*table(("fault", "stage", "what goes wrong"), body), "")


def _would_have_caught(one: Invariant) -> Iterator[str]:
    """Public reports its faults stand for."""
    if one.reports:
        yield "## Public reports it would have caught\n"
        yield f"{', '.join(map(linked, one.reports))}\n"


def linked(reference: str) -> str:
    """A public report as a link: ``owner/repo#123``, an issue or a pull request, or ``owner/repo@1a2b3c``, a commit.

    Raises:
        ValueError: it is neither.
    """
    found = _REFERENCE.fullmatch(reference)
    if found is None:
        raise ValueError(f"{reference}: no reference such as owner/repo#123 or owner/repo@1a2b3c")
    return f"[{reference}](https://github.com/{found['repo']}/{_PAGES[found['mark']]}/{found['what']})"


def codes_table() -> str:
    """All codes with the sentence each enforces."""
    body = [(f"[{one.code}]({one.code}.md)", one.severity, one.says) for one in catalogue()]
    return "\n".join(table(("code", "severity", "enforces"), body)) + "\n"


def sources_table() -> str:
    """The sources an invariant's header names."""
    return "\n".join(table(("source", "invariant"), list(SOURCES.items()))) + "\n"


def cli_page() -> str:
    """The reference of every command: what Typer writes of the application, then exit codes and environment."""
    typer = [sys.executable, "-m", "typer", "lineage.cli", "utils", "docs", "--name", "lineage"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*typer, "--title", "The command line"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    # `\b` keeps the lines of a paragraph in the terminal; here a block does
    text = re.sub(r"^\x08\n(.*?)\n$", r"```text\n\1\n```\n", done.stdout, flags=re.M | re.S)
    for name, sentence in re.findall(r"^## `lineage ([\w-]+)`\n\n(.*)$", text, re.M):
        text = re.sub(rf"^\* `{name}`: .*$", f"* [`{name}`](#lineage-{name}): {sentence}", text, flags=re.M)
    codes = table(("exit code", "means"), [(str(int(code)), said) for code, said in JUDGES.items()])
    variables = table(("variable", "does"), [(f"`{name}`", said) for name, said in ENVIRONMENT])
    return "\n".join(
        [
            "<!-- made by scripts/make_docs.py from cli/ -->",
            text.rstrip() + "\n",
            "## Exit codes\n",
            *codes,
            "\nOver several traces 2 beats 1 beats 3 beats 0. An error is one line on stderr: what, where, how to mend",
            "it. With `--json` nothing but JSON goes to stdout. When the reader of a pipe leaves (`head`), a command",
            "ends in silence with 141, as a shell says of a broken pipe.\n",
            "## Environment\n",
            *variables,
            "\n`lineage --install-completion` teaches the shell the commands, the options and the codes;",
            "`lineage --show-completion` prints what it would write.",
            "",
        ]
    )


def with_files(text: str) -> str:
    """A page whose blocks under ``<!-- file: PATH -->`` hold that file."""
    return _FILE.sub(lambda block: block["head"] + (ROOT / block["path"]).read_text("utf-8"), text)


def with_outputs(text: str) -> str:
    """A page whose ``console`` blocks hold what their commands print; blocks that differ only in seconds stay."""

    def rerun(block: re.Match[str]) -> str:
        output = run(block["arguments"])
        if _SECONDS.sub("", output) == _SECONDS.sub("", block["output"]):
            return block[0]
        return f"$ lineage {block['arguments']}\n{output}"

    return CONSOLE.sub(rerun, text)


def run(arguments: str) -> str:
    """What ``lineage <arguments>`` prints, as typed in the repository root."""
    command = [sys.executable, "-m", "lineage.cli", *shlex.split(arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout


def words(type_: pa.DataType) -> str:
    """An Arrow type in words."""
    if pa.types.is_struct(type_):
        return "{" + ", ".join(f"{member.name} {words(member.type)}" for member in type_) + "}"
    if pa.types.is_list(type_):
        return f"list of {words(type_.value_type)}"
    if pa.types.is_map(type_):
        return f"map of {words(type_.key_type)} to {words(type_.item_type)}"
    return "float64" if pa.types.is_float64(type_) else str(type_)


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *body]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def stale(made: Mapping[Path, str]) -> Iterator[Path]:
    """Pages whose text is not what was made from the code, and pages of codes that are no more."""
    for path, text in made.items():
        if not path.exists() or path.read_text("utf-8") != text:
            yield path
    yield from sorted(path for path in (ROOT / "docs" / "checks").glob("[A-Z]*[0-9].md") if path not in made)


def _unit(text: str) -> str:
    return re.sub(r"vocabulary\.\w+", "[words](#words)", text)


def main() -> int:
    """Write the pages, or with ``--check`` say which are stale."""
    parser = argparse.ArgumentParser(description="Write the pages that are made from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a page is stale")
    check = parser.parse_args().check
    made = pages()
    found = list(stale(made))
    for path in found:
        if check:
            print(f"stale: {path.relative_to(ROOT)}; run: python scripts/make_docs.py", file=sys.stderr)
        elif path in made:
            path.write_text(made[path], "utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
        else:
            path.unlink()
            print(f"removed {path.relative_to(ROOT)}")
    return 1 if check and found else 0


if __name__ == "__main__":
    sys.exit(main())
