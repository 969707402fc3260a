"""Make ``traces/samples``: one good trace, and one bad trace for each code of the catalogue.

``python scripts/make_samples.py [CODE ...]`` records each from a small real run (``lineage.trainer.faults.lab``); a bad
one has one fault of ``lineage.trainer.faults`` in it. No network; on one machine a second run writes the same bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq

from lineage.checks import check
from lineage.checks.catalogue import catalogue
from lineage.trainer.faults.lab import record
from lineage.trainer.faults.registry import Fault, all_faults

SAMPLES = Path(__file__).resolve().parents[1] / "traces" / "samples"


def path_of(code: str | None) -> Path:
    """The sample of a code, or the good one."""
    return SAMPLES / "good.parquet" if code is None else SAMPLES / "bad" / f"{code}.parquet"


def sample_faults() -> dict[str, Fault]:
    """The fault of each code's sample: the first by name."""
    faults = all_faults().values()
    return {one.code: fault for one in catalogue() for fault in faults if fault.code == one.code}


def make(code: str | None) -> Path:
    """Record a sample and write it small."""
    made = record(path_of(code), None if code is None else sample_faults()[code])
    shrink(made)
    return made


def shrink(path: Path) -> None:
    """Write a trace anew, the same rows in half the bytes: no statistics, dictionaries or Arrow schema for 350 rows."""
    table, metadata = pq.read_table(path), pq.read_metadata(path).metadata or {}
    plain = {"compression": "zstd", "compression_level": 22, "use_dictionary": False, "write_statistics": False}
    with pq.ParquetWriter(path, table.schema, store_schema=False, **plain) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({key: said for key, said in metadata.items() if key != b"ARROW:schema"})


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the samples that are named, all of them by default."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("codes", nargs="*", metavar="CODE", help="good, or a code of the catalogue; all by default")
    faults = sample_faults()
    named = parser.parse_args(arguments).codes or ["good", *faults]
    if unknown := [code for code in named if code != "good" and code not in faults]:
        parser.error(f"no fault for {', '.join(unknown)}; known: good, {', '.join(faults)}")
    for code in named:
        made = make(None if code == "good" else code)
        head = check(made).headline
        says = f"{head.invariant.code} in {head.violation.stage}" if head else "clean"
        print(f"{made.relative_to(SAMPLES)}  {made.stat().st_size / 1000:.0f} kB  {says}")


if __name__ == "__main__":
    main()
