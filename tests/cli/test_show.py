"""``lineage show``: the ribbon above the table."""

from __future__ import annotations

import json
import re
import sys

import pytest

from lineage.cli.ribbon import print_ribbons
from lineage.cli.table import print_table
from lineage.testing import record
from lineage.traces.ribbon import Ribbon, Span


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """One prompt, two trajectories: one with a tool's answer in its middle, one that answered at once."""
    told = [
        ("u_0_0", 0, "prompt", 0, 3, None),
        ("u_0_0", 1, "policy", 3, 4, 4),
        ("u_0_0", 2, "observation", 7, 3, None),
        ("u_0_0", 3, "policy", 10, 2, 3),
        ("u_1_0", 0, "prompt", 0, 3, None),
        ("u_1_0", 1, "policy", 3, 2, 2),
    ]
    names, numbers, roles, starts, lengths, generated = map(list, zip(*told, strict=True))
    with record(tmp_path_factory.mktemp("show")) as recording:
        recording.step(1)
        with recording.stage("rollout", producer="AgentLoopWorker.run") as stage:
            batch = {
                "prompts": [[1, 2, 3]] * 2,
                "responses": [list(range(9)), [7, 8]],
                "response_mask": [[1, 1, 1, 1, 0, 0, 0, 1, 1], [1, 1]],
            }
            stage.produce(batch, keys=["u_0_0", "u_1_0"])
            stage.produce(
                {"turns": [[9] * length for length in lengths]},
                keys=names,
                entity="turn",
                columns={"turn": numbers, "start": starts, "role": roles, "generated": generated},
            )
        recording.seal()
    return recording.trace


def test_a_trajectory_is_drawn_above_its_table(command, traced):
    """One character a token, each role its own, then where each turn stands, then the events."""
    lines = command("show", traced, "u_0_0").out.splitlines()
    assert lines[4:12] == [
        "prompt_len 3  response_len 9  seq_len 12  policy_len 6",
        "...####ooo##",
        "   turn  role         tokens  length  generated",
        ".  0     prompt       0..2    3       -",
        "#  1     policy       3..6    4       4",
        "o  2     observation  7..9    3       -",
        "#  3     policy       10..11  2       3",
        "",
    ]
    assert lines[12].startswith("step  stage ")


def test_a_group_is_a_line_a_trajectory(command, traced):
    """The trajectories of a uid stand under one another on one scale, named by session and index."""
    lines = command("show", traced, "u").out.splitlines()
    assert lines[4:7] == [
        "_0_0  ...####ooo##  prompt    3  response    9  policy    6",
        "_1_0  ...##         prompt    3  response    2  policy    2",
        ". prompt  # policy  o observation",
    ]


def test_json_carries_the_ribbon(command, traced):
    """Spans and lengths are in the JSON as they are in the trace."""
    (ribbon,) = json.loads(command("show", traced, "u_0_0", "--json").out)["ribbons"]
    assert (ribbon["prompt_len"], ribbon["response_len"], ribbon["policy_len"]) == (3, 9, 6)
    assert ribbon["from_turns"] is True
    assert [(span["role"], span["start"], span["length"]) for span in ribbon["spans"]] == [
        ("prompt", 0, 3),
        ("policy", 3, 4),
        ("observation", 7, 3),
        ("policy", 10, 2),
    ]


def test_a_trace_without_turns_says_so(command, trace_file):
    """The lengths are drawn, and a line says that nothing else was there to draw."""
    key = command("sql", trace_file, "select key from trajectories where not is_padding limit 1", "--format", "csv")
    out = command("show", trace_file, key.out.split()[1]).out
    assert "no turn rows in the trace: drawn from the lengths and the mask sum" in out


def long_ribbon(turns):
    """A ribbon of so many turns of 50 tokens, policy and observation in turn."""
    roles = ["observation", "policy"]
    spans = tuple(Span(roles[i % 2], 50 * i, 50, i) for i in range(turns))
    return Ribbon(1, "u_0_0", 0, 50 * turns, 50 * turns, None, None, None, False, True, spans)


def test_a_long_ribbon_keeps_to_the_width(capsys, monkeypatch):
    """The bar is as wide as the terminal, and of very many turns the middle ones are left out of the list."""
    monkeypatch.setenv("COLUMNS", "60")
    print_ribbons([long_ribbon(40)], "u")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines[1]) == 60
    assert re.fullmatch(r"(o{1,2}#{1,2}){20}", lines[1])
    assert lines[-2] == "16 turns in the middle are left out; --json has them all"
    assert len(lines) == 1 + 1 + 1 + 24 + 1 + 1


def test_a_terminal_gets_colour_and_the_same_characters(capsys, monkeypatch):
    """On a terminal each role has its style; NO_COLOR leaves the characters."""
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    print_ribbons([long_ribbon(2)], "u")
    coloured = capsys.readouterr().out
    assert "\x1b[33m" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    print_ribbons([long_ribbon(2)], "u")
    assert "\x1b[33m" not in capsys.readouterr().out


@pytest.mark.parametrize(("width", "ruled"), [(40, True), (10, False)])
def test_a_table_wider_than_the_terminal_is_not_squeezed(
    width: int, ruled: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules where it fits, whole lines where it does not."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    print_table(["stage", "n"], [["update_actor", 3]])
    printed = capsys.readouterr().out
    assert ("━" in printed) is ruled
    assert "update_actor" in printed
