"""Write into every invariant what the faults say of it: the public reports it would have caught, the faults it catches.

    python scripts/write_reports.py [--check]

The headers ``reports`` and ``faults`` of ``checks/invariants/*.sql`` come from ``lineage.trainer.faults``; nobody
writes them by hand. ``--check`` writes nothing and exits 1 when one is stale. ``scripts/make_docs.py`` puts them on the
pages.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lineage.checks.catalogue import FOLDER
from lineage.trainer.faults.registry import all_faults
from lineage.trainer.faults.reports import public_reports

_MADE = re.compile(r"^-- (?:reports|faults):.*\n", re.M)
_LAST = re.compile(r"^-- causes:.*\n", re.M)


def headers() -> dict[Path, str]:
    """Every invariant file with the headers it should have."""
    reports, said = public_reports(), {}
    for file in sorted(FOLDER.glob("*.sql")):
        faults = [one for one in all_faults().values() if file.stem in (one.code, *one.also)]
        references = sorted({reports[name].reference for one in faults for name in one.reports if name in reports})
        made = {"reports": references, "faults": sorted(one.name for one in faults)}
        said[file] = with_headers(file.read_text("utf-8"), made)
    return said


def with_headers(text: str, made: Mapping[str, Sequence[str]]) -> str:
    """The text of an invariant with these headers behind its causes; an empty one is left out."""
    lines = "".join(f"-- {name}: {', '.join(words)}\n" for name, words in made.items() if words)
    return _LAST.sub(lambda found: found[0] + lines, _MADE.sub("", text), count=1)


def stale() -> Iterator[Path]:
    """Files whose headers are not those of the faults."""
    yield from (file for file, text in headers().items() if file.read_text("utf-8") != text)


def main() -> int:
    """Write the headers, or with ``--check`` say which are stale."""
    parser = argparse.ArgumentParser(description="Write what the faults say into the invariants' headers.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a header is stale")
    check = parser.parse_args().check
    found = list(stale())
    for file in found:
        if check:
            print(f"stale: {file.name}; run: python scripts/write_reports.py", file=sys.stderr)
        else:
            file.write_text(headers()[file], "utf-8")
            print(f"wrote {file.name}")
    return 1 if check and found else 0


if __name__ == "__main__":
    sys.exit(main())
