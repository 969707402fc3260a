"""How fast ``lineage check`` reads: facts per second and peak memory, over raw parts and over the compacted file.

    python benchmarks/check.py [--facts 10_000_000] [--threads 2] [--codes 20]

Goal: 2 million facts a second compacted by the whole catalogue on 2 cores, memory under 3 GiB however long the trace.
Each measurement runs in a process of its own, so that one does not warm the other and its peak memory is its own. The
trace is made of a recorded step (``recorded.py``), which is recorded once and kept in the system's temporary folder.
``--codes`` says which codes take the time. ``side_by_side.py`` has the same questions asked of other tools.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
for _folder in (ROOT, ROOT / "benchmarks"):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))

GOAL_FACTS_PER_SECOND = 2e6
GOAL_BYTES = 3 << 30


def write_parts(folder: Path, facts: int) -> int:
    """A run folder as a recorder leaves it: Arrow streams of one batch a step, sealed at 64 MiB, and its state."""
    import recorded

    from lineage.buffers import part_schema
    from lineage.parts import PARTS
    from lineage.run import RunInfo
    from lineage.state import StateFile
    from lineage.writer import PartWriter

    source = recorded.Recorded.kept()
    parts = folder / PARTS
    parts.mkdir(parents=True)
    RunInfo(source.run_id, config=source.config).write(parts)
    state = StateFile(parts, "driver")
    writer = PartWriter(parts, "driver")
    written = 0
    for step, (table, count) in enumerate(source.tables(facts), start=1):
        for batch in table.cast(part_schema()).combine_chunks().to_batches():
            writer.write(batch, step)
        state.state["steps"].append(step)
        written += count
    writer.seal()
    state.state["closed"] = True
    state.close()
    return written


def measure(path: Path, threads: int) -> dict[str, Any]:
    """Check one trace in this process; importing the libraries is not counted."""
    import pandas  # noqa: F401  pyarrow and duckdb load it when they first meet an array

    from lineage.checks import Kind, check

    began, cpu = time.perf_counter(), time.process_time()
    report = check(path, threads=threads)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    if report.exit_code:
        raise SystemExit(f"the trace is not clean: {report.headline}")
    return {
        "facts": report.facts,
        "rows": report.rows,
        "seconds": seconds,
        "cpu": cpu,
        "peak": peak_bytes(),
        "codes": {one.code: one.seconds for one in report.verdicts},
        "blind": [one.code for one in report.verdicts if one.kind is not Kind.PASS],
    }


def peak_bytes() -> int:
    """The most memory this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def compacted(folder: Path) -> dict[str, Any]:
    """Compact one run in this process."""
    from lineage.compact import compact

    began = time.perf_counter()
    compact(folder)
    return {"seconds": time.perf_counter() - began, "peak": peak_bytes()}


def main() -> None:
    """Write one run, measure it raw, compact it, measure it again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--facts", type=lambda text: int(text.replace("_", "")), default=10_000_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--codes", type=int, default=0, help="say how long the slowest codes take")
    parser.add_argument("--no-raw", dest="raw", action="store_false", help="leave the raw parts out")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--compact", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(measure(chosen.one, chosen.threads)))
        return
    if chosen.compact:
        print(json.dumps(compacted(chosen.compact)))
        return
    with tempfile.TemporaryDirectory(prefix="lineage-bench-") as name:
        folder = Path(name)
        print(f"{write_parts(folder, chosen.facts):,} facts in {_megabytes(folder):.0f} MB of parts", flush=True)
        if chosen.raw:
            _say("raw parts", _in_child("--one", folder, chosen))
        done = _in_child("--compact", folder, chosen)
        peak = f"peak {done['peak'] / 2**30:.2f} GiB"
        print(f"compacted in {done['seconds']:.1f} s to {_megabytes(folder):.0f} MB, {peak}", flush=True)
        runs = [_in_child("--one", folder, chosen) for _ in range(chosen.repeat)]
        best = min(runs, key=lambda one: one["seconds"])
        _say("compacted", best)
        if chosen.codes:
            _say_codes(best, chosen.codes)


def _in_child(what: str, folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, what, str(folder), "--threads", str(chosen.threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr or done.stdout)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _say(name: str, found: dict[str, Any]) -> None:
    rate = found["facts"] / found["seconds"]
    print(
        f"{name:<10} {found['seconds']:.2f} s ({found['cpu']:.2f} s of CPU), {rate / 1e6:.2f} M facts/s "
        f"(goal {GOAL_FACTS_PER_SECOND / 1e6:.0f} compacted), peak {found['peak'] / 2**30:.2f} GiB "
        f"(goal under {GOAL_BYTES / 2**30:.0f}); {len(found['codes']) - len(found['blind'])} of "
        f"{len(found['codes'])} codes pass, without a pass: {' '.join(found['blind']) or 'none'}",
        flush=True,
    )


def _say_codes(found: dict[str, Any], count: int) -> None:
    codes = sorted(found["codes"].items(), key=lambda item: -item[1])
    print(f"of {len(codes)} codes, asked side by side, the slowest, with the tables each was first to need:")
    for code, seconds in codes[:count]:
        print(f"  {code}  {seconds:.3f} s")


def _megabytes(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


if __name__ == "__main__":
    main()
