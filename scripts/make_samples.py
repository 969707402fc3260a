"""Make ``traces/samples``: one good trace, and one bad trace for each code of the catalogue.

``python scripts/make_samples.py [CODE ...]`` records each from a small real run (``lineage.trainer.faults.lab``); a bad
one has one fault of ``lineage.trainer.faults`` in it, and its metadata says which. No network; on one machine a second
run writes the same bytes.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow.parquet as pq

from lineage.checks.catalogue import catalogue
from lineage.cli.together import TOGETHER, Judgement, judged_together
from lineage.trainer.faults.lab import record
from lineage.trainer.faults.registry import Fault, FaultError, all_faults

# faults of a code that are tried before the first is taken
TRIES = 3
SAMPLES = Path(__file__).resolve().parents[1] / "traces" / "samples"


def path_of(code: str | None) -> Path:
    """The sample of a code, or the good one."""
    return SAMPLES / "good.parquet" if code is None else SAMPLES / "bad" / f"{code}.parquet"


def faults_of(code: str) -> list[Fault]:
    """The faults of a code, the lab's own configuration and the trainer's own rows first: they make small samples."""
    found = [fault for fault in all_faults().values() if code in (fault.code, *fault.also)]
    return sorted(found, key=lambda fault: (len(fault.overrides), fault.kind != "trainer", fault.name))


def choose(codes: Sequence[str], folder: Path) -> dict[str, Path]:
    """A recorded fault for each code: of its first few the one that only this code catches, if one does.

    Args:
        codes: of the catalogue.
        folder: keeps what is recorded.

    Raises:
        FaultError: a code has no fault.
    """
    faults = {code: faults_of(code) for code in codes}
    if bare := [code for code, found in faults.items() if not found]:
        raise FaultError(f"no fault for {', '.join(bare)}")
    chosen: dict[str, Path] = {}
    for tried in range(TRIES):
        open_codes = [code for code in codes if code not in chosen and tried < len(faults[code])]
        for number, some in enumerate(_portions({code: faults[code][tried] for code in open_codes})):
            place = folder / f"{tried}-{number}"
            paths = {code: record(place / f"{code}.parquet", faults[code][tried]) for code in some}
            found = judged_together(place, some)
            chosen |= {code: path for code, path in paths.items() if _alone(code, found.get(code))}
            print(f"{tried + 1}: {' '.join(some)}", flush=True)
    return {code: chosen.get(code, next(folder.glob(f"0-*/{code}.parquet"))) for code in codes}


def _portions(faults: dict[str, Fault]) -> Iterator[list[str]]:
    """Codes whose samples can be judged at once: a dozen, of one profile."""
    for profile in sorted({fault.profile for fault in faults.values()}):
        codes = [code for code, fault in faults.items() if fault.profile == profile]
        yield from (codes[start : start + TOGETHER] for start in range(0, len(codes), TOGETHER))


def _alone(code: str, found: Judgement | None) -> bool:
    """Only this code failed, or, if it only warns, none."""
    failed = {one for one, seen in found.seen.items() if seen.errors} if found else {""}
    return failed == {code} or (found is not None and not failed and found.seen[code].warnings > 0)


def shrink(path: Path) -> None:
    """Write a trace anew, the same rows in half the bytes: no statistics, dictionaries or Arrow schema for 350 rows."""
    table, metadata = pq.read_table(path), pq.read_metadata(path).metadata or {}
    plain = {"compression": "zstd", "compression_level": 22, "use_dictionary": False, "write_statistics": False}
    with pq.ParquetWriter(path, table.schema, store_schema=False, write_page_checksum=True, **plain) as writer:
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
    if "good" in named:
        _write(record(path_of(None)), path_of(None))
    with TemporaryDirectory() as folder:
        for code, path in choose([code for code in named if code != "good"], Path(folder)).items():
            _write(path, path_of(code))


def _write(path: Path, target: Path) -> None:
    shrink(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(path, target)
    print(f"{target.relative_to(SAMPLES)}  {target.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
