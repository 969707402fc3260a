"""How fast ``lineage check`` reads: facts per second and peak memory, over raw parts and over the compacted file.

    python benchmarks/check.py [--facts 10_000_000] [--threads 2]

Goal: 3 million facts a second compacted, memory under 2 GiB. Each measurement runs in a process of its own, so that one
does not warm the other and its peak memory is its own.
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

ROOT = Path(__file__).parents[1]
for _folder in (ROOT, ROOT / "benchmarks"):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))

GOAL_FACTS_PER_SECOND = 3e6
GOAL_BYTES = 2 << 30


def write_parts(folder: Path, facts: int) -> int:
    """A run folder as a recorder leaves it: Arrow streams of one batch a step, sealed at 64 MiB, and its state."""
    import synthetic

    from lineage.buffers import part_schema
    from lineage.parts import PARTS
    from lineage.run import RunInfo
    from lineage.state import StateFile
    from lineage.writer import PartWriter

    parts = folder / PARTS
    parts.mkdir(parents=True)
    RunInfo("synthetic").write(parts)
    state = StateFile(parts, "driver")
    writer = PartWriter(parts, "driver")
    written = 0
    for step, (table, count) in enumerate(synthetic.tables(facts), start=1):
        for batch in table.cast(part_schema()).combine_chunks().to_batches():
            writer.write(batch, step)
        state.state["steps"].append(step)
        written += count
    writer.seal()
    state.state["closed"] = True
    state.close()
    return written


def measure(path: Path, threads: int) -> dict[str, float]:
    """Check one trace in this process; importing the libraries is not counted."""
    import pandas  # noqa: F401  pyarrow and duckdb load it when they first meet an array

    from lineage.checks import check

    began, cpu = time.perf_counter(), time.process_time()
    report = check(path, threads=threads)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    if report.exit_code:
        raise SystemExit(f"the synthetic trace is not clean: {report.headline}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"facts": report.facts, "rows": report.rows, "seconds": seconds, "cpu": cpu, "peak": peak}


def compacted(folder: Path) -> dict[str, float]:
    """Compact one run in this process."""
    from lineage.compact import compact

    began = time.perf_counter()
    compact(folder)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": time.perf_counter() - began, "peak": peak}


def main() -> None:
    """Write one run, measure it raw, compact it, measure it again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--facts", type=lambda text: int(text.replace("_", "")), default=10_000_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
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
        print(f"{write_parts(folder, chosen.facts):,} facts in {_megabytes(folder):.0f} MB of parts")
        _say("raw parts", _in_child("--one", folder, chosen))
        done = _in_child("--compact", folder, chosen)
        peak = f"peak {done['peak'] / 2**30:.2f} GiB"
        print(f"compacted in {done['seconds']:.1f} s to {_megabytes(folder):.0f} MB, {peak}")
        _say(
            "compacted",
            min((_in_child("--one", folder, chosen) for _ in range(chosen.repeat)), key=lambda one: one["seconds"]),
        )


def _in_child(what: str, folder: Path, chosen: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, what, str(folder), "--threads", str(chosen.threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr or done.stdout)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def _say(name: str, found: dict[str, float]) -> None:
    rate = found["facts"] / found["seconds"]
    print(
        f"{name:<10} {found['seconds']:.2f} s ({found['cpu']:.2f} s of CPU), {rate / 1e6:.2f} M facts/s "
        f"(goal {GOAL_FACTS_PER_SECOND / 1e6:.0f} compacted), peak {found['peak'] / 2**30:.2f} GiB "
        f"(goal under {GOAL_BYTES / 2**30:.0f})"
    )


def _megabytes(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


if __name__ == "__main__":
    main()
