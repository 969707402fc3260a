"""The whole selftest, once: every fault by its code, every clean run clean, and each code needed by some fault.

It stands for the work of the whole catalogue, so it takes minutes.
"""

from __future__ import annotations

import json

import pytest

from lineage.checks.catalogue import catalogue


@pytest.mark.slow
def test_the_selftest_passes_and_no_code_is_idle(process) -> None:
    """Exit 0; and a code that catches no fault alone says which code of the catalogue it backs up, and why it stays."""
    done = process("selftest", "--json")
    said = json.loads(done.stdout)
    assert [
        (one["trial"]["name"], one["result"], one["blamed"], one["error"]) for one in said["trials"] if not one["good"]
    ] == []
    assert (done.returncode, said["ok"]) == (0, True)
    faults = [one for one in said["trials"] if one["wanted"]]
    # a code that only warns is alone where nothing failed
    alone = {code for one in faults if one["failed"] in ([], [code := one["wanted"]["code"]])}
    codes = {one.code: one for one in catalogue()}
    idle = {code: one.backs_up for code, one in codes.items() if code not in alone}
    assert {code for code, backs_up in idle.items() if backs_up.partition(":")[0].strip() not in codes} == set()
