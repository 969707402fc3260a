"""Make ``traces/samples``: one good trace, and one bad trace for each code of the catalogue.

``python scripts/make_samples.py [CODE ...]`` records each from a small real run (``lineage.trainer.faults.lab``); a bad
one has one fault of ``lineage.trainer.faults`` in it, and its metadata says which. No network; on one machine a second
run writes the same bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq

from lineage.checks import check
from lineage.checks.catalogue import catalogue
from lineage.trainer.faults.lab import record
from lineage.trainer.faults.registry import Fault, FaultError, all_faults

SAMPLES = Path(__file__).resolve().parents[1] / "traces" / "samples"


def path_of(code: str | None) -> Path:
    """The sample of a code, or the good one."""
    return SAMPLES / "good.parquet" if code is None else SAMPLES / "bad" / f"{code}.parquet"


def faults_of(code: str) -> list[Fault]:
    """The faults of a code, the lab's own configuration and the trainer's own rows first: they make small samples."""
    found = [fault for fault in all_faults().values() if fault.code == code]
    return sorted(found, key=lambda fault: (len(fault.overrides), fault.kind != "trainer", fault.name))


def make(code: str | None) -> Path:
    """Record a sample and write it small: of the faults of a code the first that only this code catches, if one does.

    Raises:
        FaultError: the code has no fault.
    """
    path = path_of(code)
    if code is None:
        shrink(record(path))
        return path
    faults = faults_of(code)
    if not faults:
        raise FaultError(f"{code} has no fault")
    for fault in [*faults, faults[0]]:
        failed = {one.code for one in check(record(path, fault)).verdicts if one.errors}
        if failed == {code}:
            break
    shrink(path)
    return path


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
    codes = [one.code for one in catalogue()]
    named = parser.parse_args(arguments).codes or ["good", *codes]
    if unknown := [code for code in named if code not in ("good", *codes)]:
        parser.error(f"no code {', '.join(unknown)}; known: good, {', '.join(codes)}")
    for code in named:
        made = make(None if code == "good" else code)
        head = check(made).headline
        says = f"{head.invariant.code} in {head.violation.stage}" if head else "clean"
        print(f"{made.relative_to(SAMPLES)}  {made.stat().st_size / 1000:.0f} kB  {says}")


if __name__ == "__main__":
    main()
