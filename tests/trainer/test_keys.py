"""Trajectory keys: read from the right."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lineage.trainer.keys import TrajectoryKey, parse_key


@given(st.text(min_size=1), st.integers(0, 999), st.integers(0, 99))
def test_key_round_trip(uid, session_id, index):
    """Whatever the uid, underscores included, a key reads back as it was written."""
    key = TrajectoryKey(uid, session_id, index)
    assert parse_key(str(key)) == key


@pytest.mark.parametrize("key", ["", "uid", "uid_1", "_1_2", "uid_a_0", "uid_0_-1"])
def test_other_keys_are_refused(key):
    """A prompt key or a broken one is no trajectory key."""
    with pytest.raises(ValueError, match="not a trajectory key"):
        parse_key(key)
