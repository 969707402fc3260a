"""What makes a violation the same one in the next run."""

from __future__ import annotations

import hashlib
import json

from lineage.checks.verdict import Violation


def fingerprints(code: str, one: Violation) -> dict[str, str]:
    """SARIF's ``partialFingerprints`` of a violation: 16 hexadecimal digits each.

    ``placeHash/v1`` is the code and the place in the step (stage, op, field); ``keyHash/v1`` the key as well.
    Neither holds the run, the step, the sequence number or a value: those differ from run to run of one fault. Keys are
    the same where uids are drawn from the seed. GitHub reads ``primaryLocationLineHash`` and nothing else, and would
    make it from the first line of the file; it is the one with the key.
    """
    place = (code, one.stage, one.op, one.field)
    keyed = _hash((*place, one.key))
    return {"primaryLocationLineHash": keyed, "keyHash/v1": keyed, "placeHash/v1": _hash(place)}


def _hash(parts: tuple[str | None, ...]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
