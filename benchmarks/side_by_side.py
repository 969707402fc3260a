"""The same five rules by lineage, DuckDB SQL, polars, pandas and pandera, on one trace, clean and with violations.

    python benchmarks/side_by_side.py [--facts 10_000_000] [--threads 2] [--write docs/benchmarks.md]

Each tool reads the same compacted Parquet file in a process of its own; the time counts from the file to the numbers of
violations, without importing the libraries. All must find as many. With ``--write`` the figures go to the page.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recorded import Recorded

ROOT = Path(__file__).parents[1]
for _folder in (ROOT, ROOT / "benchmarks"):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))

TOOLS = {"lineage": "rl-lineage", "duckdb": "duckdb", "polars": "polars", "pandas": "pandas", "pandera": "pandera"}
SHARES = (0.0, 0.0001, 0.05)
BEGIN, END = "<!-- figures: made by benchmarks/side_by_side.py --write -->", "<!-- end of figures -->"


def write(path: Path, facts: int, share: float, source: Recorded | None = None) -> tuple[int, Counter[str]]:
    """A trace of so many facts, in row groups as compaction makes them, and what breaks in it by rule."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import recorded
    import synthetic
    from violations import Breaker

    source = source or recorded.Recorded.kept()
    breaker = Breaker(share)
    written, held = 0, list[pa.Table]()
    writer: pq.ParquetWriter | None = None
    options: dict[str, Any] = {"compression": "zstd", "compression_level": 3, "dictionary_pagesize_limit": 4 << 20}
    for table, count in source.tables(facts):
        held.append(breaker.broken(table))
        written += count
        if sum(part["n"].to_numpy().sum() for part in held) >= synthetic.ROW_GROUP_FACTS or written >= facts:
            whole = pa.concat_tables(held).replace_schema_metadata(synthetic.metadata(source.config))
            writer = writer or pq.ParquetWriter(path, whole.schema, write_page_checksum=True, **options)
            writer.write_table(whole, row_group_size=whole.num_rows)
            held = []
    if writer is not None:
        writer.close()
    return written, breaker.made


def measure(tool: str, path: Path, threads: int) -> dict[str, Any]:
    """Ask one tool in this process."""
    import check

    os.environ["POLARS_MAX_THREADS"] = str(threads)
    import_module("pandas")
    if tool in ("polars", "pandera"):
        import_module("pandera.pandas" if tool == "pandera" else tool)
    ask = import_module(f"rivals.{tool}_rules").violations
    began = time.perf_counter()
    found = ask(path, threads)
    return {"seconds": time.perf_counter() - began, "peak": check.peak_bytes(), "found": found}


def lines_of(tool: str) -> int:
    """Lines of code of the rules: of lineage's, the SQL of the codes that hold them among other things."""
    from rivals.lineage_rules import CODES

    rules = ROOT / "benchmarks" / "rivals" / f"{tool}_rules.py"
    files = (
        [ROOT / "checks" / "invariants" / f"{code}.sql" for code in CODES.values()] if tool == "lineage" else [rules]
    )
    lines = [line.strip() for file in files for line in file.read_text("utf-8").splitlines()]
    return sum(bool(line) and not line.startswith(("--", "#", '"""', "import ", "from ")) for line in lines)


def figures(facts: int, threads: int, shares: tuple[float, ...] = SHARES) -> Iterator[str]:
    """The table, line by line."""
    yield "| violating | tool | seconds | facts/s | peak memory | violations found | lines of rules |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    with tempfile.TemporaryDirectory(prefix="lineage-side-by-side-") as name:
        for share in shares:
            path = Path(name) / f"{share}.parquet"
            written, made = write(path, facts, share)
            for tool in TOOLS:
                one = _in_child(tool, path, threads)
                if Counter(one["found"]) != made:
                    raise SystemExit(f"{tool} at {share:.2%} finds {one['found']}, not {dict(made)}")
                yield (
                    f"| {share:.2%} | {tool} | {one['seconds']:.2f} | {written / one['seconds'] / 1e6:.2f} M | "
                    f"{one['peak'] / 2**30:.2f} GiB | {made.total():,} | {lines_of(tool)} |"
                )
            path.unlink()


def _in_child(tool: str, path: Path, threads: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", tool, str(path), "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{tool}: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> None:
    """Print the table; put it into the page where one is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--facts", type=lambda text: int(text.replace("_", "")), default=10_000_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", type=Path, help="the page whose figures are replaced")
    parser.add_argument("--one", nargs=2, metavar=("TOOL", "PATH"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        tool, path = chosen.one
        print(json.dumps(measure(tool, Path(path), chosen.threads)))
        return
    said = []
    for line in figures(chosen.facts, chosen.threads):
        print(line, flush=True)
        said.append(line)
    if chosen.write:
        versions = ", ".join(f"{tool} {version(package)}" for tool, package in TOOLS.items())
        where = f"{chosen.facts:,} facts, {chosen.threads} threads, Python {platform.python_version()}; {versions}."
        page = chosen.write.read_text("utf-8")
        before, rest = page.split(BEGIN)
        _, after = rest.split(END)
        chosen.write.write_text(before + "\n".join([BEGIN, where, "", *said, END]) + after, "utf-8")


if __name__ == "__main__":
    main()
