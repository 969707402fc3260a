"""Rows of turns: an element a turn, with marks at both ends that place it in its trajectory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lineage
from lineage.fingerprint import chained_prefixes, fingerprint_rows, reference_fingerprint

tokens = st.integers(-5, 1 << 40)
trajectory = st.lists(st.lists(tokens, max_size=5), min_size=1, max_size=5)


def joined(pieces: list[list[int]]) -> list[int]:
    """Pieces laid end to end."""
    return [token for piece in pieces for token in piece]


@given(st.lists(trajectory, max_size=4))
def test_prefixes_follow_from_the_pieces(sequences: list[list[list[int]]]) -> None:
    """The fingerprint before and after each piece is that of the sequence's elements up to there."""
    pieces = [piece for sequence in sequences for piece in sequence]
    lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
    before = [joined(sequence[:place]) for sequence in sequences for place in range(len(sequence))]
    flat = np.array(joined(pieces), dtype=np.int64)
    begins = np.array([len(head) for head in before], dtype=np.int64)
    found = chained_prefixes(fingerprint_rows(flat, lengths), lengths, begins)
    expected = [
        [reference_fingerprint(head), reference_fingerprint(head + piece)]
        for head, piece in zip(before, pieces, strict=True)
    ]
    assert found.tolist() == expected


def turn_rows(folder: Path, calls: list[dict[str, list[list[int]]]], sidecar: bool = False) -> list[dict[str, Any]]:
    """Record trajectories by key as calls of one stage; the rows about turns."""
    with lineage.record(folder, sidecar=sidecar) as recorder:
        recorder.step(1)
        with recorder.stage("rollout", producer="worker") as stage:
            for trajectories in calls:
                keys = [key for key, turns in trajectories.items() for _ in turns]
                starts = [sum(map(len, turns[:n])) for turns in trajectories.values() for n in range(len(turns))]
                roles = [["prompt", "policy"][n % 2] for turns in trajectories.values() for n in range(len(turns))]
                stage.produce(
                    {"turns": [turn for turns in trajectories.values() for turn in turns]},
                    keys=keys,
                    entity="turn",
                    columns={"start": starts, "role": roles},
                )
            stage.produce(
                {"input_ids": [joined(turns) for call in calls for turns in call.values()]},
                keys=[key for call in calls for key in call],
            )
    return pq.read_table(folder / "trace.parquet").to_pylist()


@settings(max_examples=8, deadline=None)
@given(st.lists(st.lists(trajectory, min_size=1, max_size=3), min_size=1, max_size=3))
def test_last_mark_is_the_sequence(drawn: list[list[list[list[int]]]]) -> None:
    """Turns recorded in any number of calls are one row; each begins where the last one ends, the last at seq_len."""
    calls = [
        {f"u{call}_{place}_0": turns for place, turns in enumerate(trajectories)}
        for call, trajectories in enumerate(drawn)
    ]
    with tempfile.TemporaryDirectory() as folder:
        made = turn_rows(Path(folder) / "run", calls)
    row = next(row for row in made if row["entity"] == "turn")
    whole = next(row for row in made if row["field"] == "input_ids")
    assert (row["field"], row["span"], row["stage"], row["op"]) == ("turns", "sequence", "rollout", "produce")
    assert [marks[0]["at"] for marks in row["marks"]] == row["start"]
    ends = dict(zip(row["key"], (marks[1] for marks in row["marks"]), strict=True))  # the last of each key
    for key, length, fingerprint in zip(whole["key"], whole["length"], whole["fingerprint"], strict=True):
        assert ends[key] == {"at": length, "fp": fingerprint}
    following = zip(row["key"], row["key"][1:], row["marks"], row["marks"][1:], strict=False)
    assert all(this[1] == after[0] for key, next_key, this, after in following if key == next_key)


@pytest.mark.parametrize("sidecar", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_marks_lie_beside_those_of_prompt_and_response(tmp_path: Path, sidecar: bool) -> None:
    """A step with turn rows still has the three marks of its sequences; the rows are the same from a sidecar."""
    with lineage.record(tmp_path / "run", sidecar=sidecar) as recorder:
        recorder.step(1)
        with recorder.stage("rollout", producer="worker") as stage:
            stage.produce({"prompts": [[1, 2]], "input_ids": [[1, 2, 3, 4]]}, keys=["u_0_0"])
            stage.produce(
                {"turns": [[1, 2], [3, 4]]},
                keys=["u_0_0"] * 2,
                entity="turn",
                columns={"role": ["prompt", "policy"], "truncated_from": [9, None]},
            )
    made = {row["field"]: row for row in pq.read_table(tmp_path / "run" / "trace.parquet").to_pylist()}
    prefixes = [reference_fingerprint([1, 2, 3, 4][:at]) for at in range(5)]
    assert made["input_ids"]["marks"] == [[{"at": at, "fp": prefixes[at]} for at in (1, 2, 3)]]
    assert made["turns"]["marks"] == [[{"at": at, "fp": prefixes[at]} for at in pair] for pair in ((0, 2), (2, 4))]
    assert made["turns"]["role"] == ["prompt", "policy"]
    assert made["turns"]["truncated_from"] == [9, None]
    assert made["prompts"]["marks"] is None


def test_a_gap_shows_against_the_declared_start(tmp_path: Path) -> None:
    """Turns that leave tokens out have marks that are not at the declared starts."""
    with lineage.record(tmp_path / "run") as recorder:
        recorder.step(1)
        with recorder.stage("rollout", producer="worker") as stage:
            columns = {"start": [0, 3], "role": ["prompt", "policy"]}
            stage.produce({"turns": [[1, 2], [4]]}, keys=["u_0_0"] * 2, entity="turn", columns=columns)
    row = pq.read_table(tmp_path / "run" / "trace.parquet").to_pylist()[0]
    assert [marks[0]["at"] for marks in row["marks"]] == [0, 2] != row["start"]
