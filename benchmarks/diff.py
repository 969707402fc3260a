"""How fast ``lineage diff`` compares: seconds, facts per second and peak memory, on two traces of millions of facts.

    python benchmarks/diff.py [--facts 10_000_000] [--threads 2] [--trace FILE]

Goal: 10 million facts a side in under a minute on 2 cores, memory under 3 GiB however long the traces. One trace is
held against a copy (every row finds its row), a copy in which one fact in a thousand has another fingerprint, one in
which every fact of floats has (all are looked at one by one), and one whose rows are cut in two, of two processes (no
row finds its row, every fact finds its fact). Each comparison runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).parents[1]
for _folder in (ROOT, ROOT / "benchmarks"):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))

GOAL_SECONDS, GOAL_BYTES = 60, 3 << 30


def altered(table: pa.Table, every: int) -> pa.Table:
    """The same rows, with another fingerprint of one fact in so many that have one."""
    at = table.schema.get_field_index("fingerprint")
    lists = table["fingerprint"].combine_chunks()
    flat = lists.values.to_numpy(zero_copy_only=False).copy()
    known = np.asarray(lists.values.is_valid())
    flat[::every] += np.uint64(1)
    values = pa.array(flat, pa.uint64(), mask=~known)
    changed = pa.ListArray.from_arrays(lists.offsets, values, mask=lists.is_null())
    return table.set_column(at, table.schema.field(at), changed)


def drifted(table: pa.Table) -> pa.Table:
    """The same rows, with another fingerprint of every fact of floats."""
    floats = pa.compute.match_substring(table["dtype"].combine_chunks().cast(pa.string()), "float")
    lists = table["fingerprint"].combine_chunks()
    counts = np.diff(lists.offsets.to_numpy())
    moved = np.repeat(floats.fill_null(False).to_numpy(zero_copy_only=False), counts)
    flat = lists.values.to_numpy(zero_copy_only=False) + moved.astype(np.uint64)
    values = pa.array(flat, pa.uint64(), mask=~np.asarray(lists.values.is_valid()))
    changed = pa.ListArray.from_arrays(lists.offsets, values, mask=lists.is_null())
    return table.set_column(table.schema.get_field_index("fingerprint"), table.schema.field("fingerprint"), changed)


def resplit(table: pa.Table) -> pa.Table:
    """Every row of two elements or more as two rows, the second of another process."""
    from lineage.schema import COLUMNS

    listed = {column.name for column in COLUMNS if column.listed}
    n = table["n"].to_numpy()
    halves = np.where(n >= 2, 2, 1)
    source = np.repeat(np.arange(len(n)), halves)
    second = np.zeros(len(source), dtype=bool)
    second[1:] = source[1:] == source[:-1]
    columns: dict[str, Any] = {}
    for field in table.schema:
        column = table[field.name].combine_chunks()
        if field.name not in listed:
            columns[field.name] = column.take(pa.array(source))
            continue
        offsets = column.offsets.to_numpy()
        filled = np.diff(offsets) > 0
        starts = offsets[:-1][source] + np.where(second & filled[source], n[source] // 2, 0)
        columns[field.name] = pa.ListArray.from_arrays(
            pa.array(np.append(starts, offsets[-1]), pa.int32()),
            column.values,
            type=field.type,
            mask=column.is_null().take(pa.array(source)),
        )
    both = halves[source] == 2
    columns["n"] = pa.array(np.where(second, n[source] - n[source] // 2, np.where(both, n[source] // 2, n[source])))
    columns["n"] = columns["n"].cast(pa.int32())
    names = table["process"].combine_chunks().take(pa.array(source)).cast(pa.string()).to_numpy(zero_copy_only=False)
    columns["process"] = pa.array(np.where(second, "worker:1", names))
    return pa.table(columns).cast(pa.schema([pa.field(field.name, columns[field.name].type) for field in table.schema]))


VARIANTS: dict[str, Callable[[pa.Table], pa.Table]] = {
    "the same": lambda table: table,
    "1 in 1000 altered": lambda table: altered(table, 1000),
    "all floats altered": drifted,
    "rows cut in two": resplit,
}


def rewrite(source: Path, target: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    """A copy of a trace, each row group changed."""
    opened = pq.ParquetFile(source)
    writer: pq.ParquetWriter | None = None
    for group in range(opened.num_row_groups):
        table = change(opened.read_row_group(group))
        if writer is None:
            schema = table.schema.with_metadata(opened.schema_arrow.metadata)
            writer = pq.ParquetWriter(target, schema, compression="zstd", write_page_checksum=True)
            writer.add_key_value_metadata(
                {key: value for key, value in (opened.metadata.metadata or {}).items() if key != b"ARROW:schema"}
            )
        writer.write_table(table.cast(schema), row_group_size=table.num_rows)
    assert writer is not None
    writer.close()


def measure(a: Path, b: Path, threads: int) -> dict[str, Any]:
    """Compare two traces in this process; importing the libraries is not counted."""
    import check

    from lineage.traces.diff import diff

    began, cpu = time.perf_counter(), time.process_time()
    found = diff(a, b, threads=threads)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    said = sorted({one.aspect for one in found.counts})
    differs = sum(one.facts for one in found.counts if one.counts)
    return {
        "facts": found.a.facts,
        "seconds": seconds,
        "cpu": cpu,
        "peak": check.peak_bytes(),
        "equal": found.equal,
        "aspects": said,
        "differs": differs,
    }


def main() -> None:
    """Make one trace, its copies, and compare."""
    import check

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--facts", type=lambda text: int(text.replace("_", "")), default=10_000_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trace", type=Path, help="a trace.parquet to compare, instead of a new one")
    parser.add_argument("--one", type=Path, nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(measure(*chosen.one, chosen.threads)))
        return
    with tempfile.TemporaryDirectory(prefix="lineage-bench-") as name:
        folder = Path(name)
        trace = chosen.trace
        if trace is None:
            check.write_parts(folder / "run", chosen.facts)
            check.compacted(folder / "run")
            trace = folder / "run" / "trace.parquet"
        for variant, change in VARIANTS.items():
            copy = folder / "copy.parquet"
            rewrite(trace, copy, change)
            command = [sys.executable, __file__, "--one", str(trace), str(copy), "--threads", str(chosen.threads)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr or done.stdout)
            _say(variant, json.loads(done.stdout))


def _say(variant: str, found: dict[str, Any]) -> None:
    verdict = "equal" if found["equal"] else f"{found['differs']:,} differ"
    print(
        f"{variant:<19} {found['seconds']:.1f} s ({found['cpu']:.1f} s of CPU; goal under {GOAL_SECONDS}), "
        f"{found['facts'] / found['seconds'] / 1e6:.2f} M facts a side/s, peak {found['peak'] / 2**30:.2f} GiB "
        f"(goal under {GOAL_BYTES >> 30}); {verdict}: {', '.join(found['aspects']) or 'nothing'}",
        flush=True,
    )


if __name__ == "__main__":
    main()
