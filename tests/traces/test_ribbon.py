"""Ribbons: the turns of a trajectory, and how they are laid out on a line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lineage.testing import record
from lineage.traces import open_trace
from lineage.traces.life import life
from lineage.traces.ribbon import UNKNOWN, Ribbon, Span, cells, ribbons, tiled

# one tool session: prompt, call, answer of the tool with the template's tokens before it, conclusion
TURNS = [
    ("prompt", 0, 3, None),
    ("policy", 3, 4, 4),
    ("inserted", 7, 1, None),
    ("observation", 8, 2, None),
    ("policy", 10, 2, 3),
]


def tool_trace(folder, turns=True):
    """A trace of two trajectories, the first with five turns, the second with two."""
    keys = ["u_0_0", "u_1_0"]
    batch = {
        "prompts": [[1, 2, 3], [1, 2, 3]],
        "responses": [list(range(9)), [7, 8]],
        "response_mask": [[1, 1, 1, 1, 0, 0, 0, 1, 1], [1, 1]],
    }
    told = [("u_0_0", i, *turn) for i, turn in enumerate(TURNS)]
    told += [("u_1_0", 0, "prompt", 0, 3, None), ("u_1_0", 1, "policy", 3, 2, 2)]
    names, numbers, roles, starts, lengths, generated = map(list, zip(*told, strict=True))
    with record(folder) as recording:
        recording.step(1)
        with recording.stage("rollout", producer="AgentLoopWorker.run") as stage:
            stage.produce(batch, keys=keys, columns={"min_global_steps": [0, 0], "max_global_steps": [1, 0]})
            if turns:
                stage.produce(
                    {"turns": [[9] * length for length in lengths]},
                    keys=names,
                    entity="turn",
                    columns={"turn": numbers, "start": starts, "role": roles, "generated": generated},
                )
        recording.seal()
    return recording.trace


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """The trace, with turn rows."""
    return tool_trace(tmp_path_factory.mktemp("turns"))


def test_a_ribbon_is_the_turns_and_the_four_lengths(traced):
    """Turns come in the order of their tokens, with what the engine counted; lengths and versions are beside them."""
    with open_trace(traced) as trace:
        (one,) = ribbons(trace, life(trace, "u_0_0"))
    assert one.from_turns
    assert [(span.role, span.start, span.length, span.generated) for span in one.spans] == TURNS
    assert [span.turn for span in one.spans] == [0, 1, 2, 3, 4]
    assert (one.prompt_len, one.response_len, one.seq_len, one.policy_len) == (3, 9, 12, 6)
    assert (one.min_global_steps, one.max_global_steps) == (0, 1)


def test_a_group_has_a_ribbon_a_trajectory(traced):
    """A uid gives the ribbon of each of its trajectories, by session and index."""
    with open_trace(traced) as trace:
        drawn = ribbons(trace, life(trace, "u"))
    assert [one.key for one in drawn] == ["u_0_0", "u_1_0"]
    assert [len(one.spans) for one in drawn] == [5, 2]


def test_without_turn_rows_the_lengths_are_drawn(tmp_path):
    """Prompt, then as many policy tokens as the mask has; of the rest nobody knows the author."""
    with open_trace(tool_trace(tmp_path, turns=False)) as trace:
        first, second = ribbons(trace, life(trace, "u"))
    assert not first.from_turns
    assert [(span.role, span.start, span.length) for span in first.spans] == [
        ("prompt", 0, 3),
        ("policy", 3, 6),
        (UNKNOWN, 9, 3),
    ]
    assert [span.role for span in second.spans] == ["prompt", "policy"]


def test_a_trace_without_lengths_has_no_ribbon(tmp_path):
    """A field that covers no tokens draws nothing."""
    with record(tmp_path) as recording:
        recording.step(1)
        with recording.stage("reward", producer="scorer") as stage:
            stage.produce({"acc": [1.0]}, keys=["u_0_0"])
        recording.seal()
    with open_trace(recording.trace) as trace:
        assert ribbons(trace, life(trace, "u_0_0")) == ()


def ribbon_of(spans, tokens=None):
    """A ribbon of these spans."""
    return Ribbon(1, "u_0_0", None, None, tokens, None, None, None, False, True, tuple(spans))


@st.composite
def laid(draw):
    """Spans end to end, some empty."""
    spans, at = [], 0
    for role in draw(st.lists(st.sampled_from(["prompt", "policy", "observation"]), min_size=1, max_size=30)):
        length = draw(st.integers(0, 400))
        spans.append(Span(role, at, length))
        at += length
    return spans


@given(laid(), st.integers(1, 120))
def test_a_ribbon_fills_its_line_and_no_more(spans, width):
    """As many characters as there are tokens, or the whole width; in the order of the turns."""
    drawn = cells(ribbon_of(spans), width)
    total = sum(span.length for span in spans)
    assert sum(size for _, size in drawn) == min(total, width)
    full = [span for span in spans if span.length]
    if total <= width:
        assert drawn == [(span.role, span.length) for span in full]
    elif len(full) <= width:
        assert [role for role, _ in drawn] == [span.role for span in full]
        assert all(1 <= size <= span.length for (_, size), span in zip(drawn, full, strict=True))


@given(laid(), st.integers(1, 120))
def test_longer_turns_are_drawn_longer(spans, width):
    """Scaling keeps the order of the lengths, but for one character of rounding."""
    full = [span for span in spans if span.length]
    drawn = [size for _, size in cells(ribbon_of(spans), width)]
    if len(full) <= width:
        for one, other in zip(range(len(full)), range(1, len(full)), strict=False):
            if full[one].length >= full[other].length:
                assert drawn[one] >= drawn[other] - 1


@given(
    st.lists(st.builds(Span, st.just("policy"), st.integers(0, 60), st.integers(0, 30)), max_size=8), st.integers(0, 99)
)
def test_tiles_leave_no_gap_and_no_overlap(spans, tokens):
    """Whatever turns a trace tells of, each token has one author or none that is known."""
    tiles = tiled(spans, tokens)
    assert [tile.start for tile in tiles] == [0, *(tile.end for tile in tiles)][: len(tiles)]
    assert sum(tile.length for tile in tiles) == max([tokens, *(span.end for span in spans if span.length)])
    told = {token for span in spans for token in range(span.start, span.end)}
    assert told == {token for tile in tiles if tile.role == "policy" for token in range(tile.start, tile.end)}
