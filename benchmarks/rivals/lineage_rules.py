"""The five codes that say so among others, over what one pass keeps of the file, as for the whole catalogue."""

from __future__ import annotations

from pathlib import Path

CODES = {"alignment": "LEN001", "groups": "KEY002", "order": "QUE001", "conservation": "QUE002", "advantage": "ADV002"}


def violations(path: Path, threads: int) -> dict[str, int]:
    from lineage.checks import check

    report = check(path, select=list(CODES.values()), threads=threads)
    return {rule: report.verdict(code).errors for rule, code in CODES.items()}
