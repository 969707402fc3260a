"""What an engine was asked and answered, held against what is trained: the lawful ways, and their neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import lineage
from lineage.checks import Kind, check

PROMPT, CALL, SAID, END = [1, 2, 3, 4], [10, 11, 12], [20, 21], [30, 31]
TURNS = [("prompt", PROMPT), ("policy", CALL), ("observation", SAID), ("policy", END)]
ASKED = [(PROMPT, CALL), ([*PROMPT, *CALL, *SAID], END)]
CODES = ("MSK003", "MSK004", "MSK006", "TOK002", "TOK003")


def record(
    recorder: Any,
    uid: str,
    turns: Sequence[tuple[str, list[int]]] = TURNS,
    asked: Sequence[tuple[list[int], list[int]]] = ASKED,
    *,
    names: Sequence[str] = (),
    mask: list[int] | None = None,
    tags: dict[str, Any] | None = None,
    with_turns: bool = True,
    **columns: dict[int, int],
) -> None:
    """Record one trajectory as its loop says it, and what the engine was asked.

    Args:
        turns: author and tokens of each.
        asked: prompt and answer of each request.
        names: their ids, where they are not ``{uid}_0_{number}``.
        mask: of the response; 1 on the policy's turns if not given.
        tags: of the trajectory.
        columns: columns of the turns, by the number of the turn.
    """
    key, prompt, response = f"{uid}_0_0", turns[0][1], [token for _, ids in turns[1:] for token in ids]
    made = mask if mask is not None else [int(role == "policy") for role, ids in turns[1:] for _ in ids]
    starts = np.cumsum([0, *(len(ids) for _, ids in turns)])[:-1].tolist()
    with recorder.stage("rollout", producer="worker") as stage:
        ids = list(names) or [f"{uid}_0_{number}" for number in range(len(asked))]
        requests = {"prompts": [one for one, _ in asked], "responses": [one for _, one in asked]}
        stage.generate({name: list(map(np.array, rows)) for name, rows in requests.items()}, keys=ids)
        said = {"finish_reason": ["stop"], **{name: [value] for name, value in (tags or {}).items()}}
        stage.tag([key], columns=said)
        fields = {"prompts": prompt, "responses": response, "response_mask": made, "input_ids": [*prompt, *response]}
        stage.produce({name: [np.array(value)] for name, value in fields.items()}, keys=[key])
        if with_turns:
            told = {name: [of.get(turn) for turn in range(len(turns))] for name, of in columns.items()}
            told |= {"turn": list(range(len(turns))), "start": starts, "role": [role for role, _ in turns]}
            told.setdefault("generated", [len(ids) if role == "policy" else None for role, ids in turns])
            contents = {"turns": [np.array(ids) for _, ids in turns]}
            stage.produce(contents, keys=[key] * len(turns), entity="turn", columns=told)


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """By the name of a way: the codes that fail on it. Each way is a step of one trace."""
    folder = tmp_path_factory.mktemp("ways") / "run"
    ways = {"plain": {}, **LAWFUL, **{way: said for way, (said, _) in BROKEN.items()}}
    with lineage.record(folder) as recorder:
        for step, (way, said) in enumerate(ways.items(), start=1):
            recorder.step(step)
            record(recorder, way, **said)
    found: dict[str, set[str]] = {way: set() for way in ways}
    for verdict in check(folder, select=CODES).verdicts:
        assert verdict.kind is Kind.FAIL
        for one in verdict.violations:
            found[str(one.key).removesuffix("_0_0")].add(verdict.code)
    return found


CUT = [("prompt", PROMPT), ("policy", CALL[:2]), ("observation", SAID), ("policy", END)]
LAWFUL = {
    # a request that was aborted went on as another one: together they are the turn
    "resumed": {"asked": [(PROMPT, CALL[:1]), ([*PROMPT, CALL[0]], CALL[1:]), ASKED[1]]},
    # an answer that nobody kept
    "discarded": {"asked": [*ASKED, (PROMPT, [7, 7])]},
    # an engine that numbers its requests itself
    "other_ids": {"names": ("f00", "ba4")},
    # a cut of an answer that is declared
    "declared_cut": {
        "turns": CUT,
        "asked": [ASKED[0], ([*PROMPT, *CALL[:2], *SAID], END)],
        "generated": {1: 3, 3: 2},
        "truncated_from": {1: 3},
    },
    # a trim that is declared: the next prompt lacks what was trimmed
    "declared_trim": {"asked": [ASKED[0], ([*CALL, *SAID], END)], "trimmed": {2: 0}},
    # an end that the loop appended: not the policy's, mask 0
    "end_appended": {"turns": [*TURNS[:2], ("inserted", [9])], "asked": ASKED[:1]},
    # rows without turns: one answer, one request
    "no_turns": {"turns": TURNS[:2], "asked": ASKED[:1], "with_turns": False, "tags": {"generated": 3}},
    # a row left out with a reason
    "left_out": {"mask": [0] * 7, "tags": {"reason": "truncated_masked"}},
}
BROKEN = {
    "resumed_in_another_order": ({"asked": [(PROMPT, CALL[1:]), (PROMPT, CALL[:1]), ASKED[1]]}, {"TOK002"}),
    "other_ids_other_answer": ({"names": ("f00", "ba4"), "asked": [ASKED[0], (ASKED[1][0], [30, 32])]}, {"TOK002"}),
    "silent_cut": ({"turns": CUT, "generated": {1: 3, 3: 2}}, {"MSK006", "TOK002", "TOK003"}),
    "silent_trim": ({"asked": [ASKED[0], ([*CALL, *SAID], END)]}, {"TOK003"}),
    "first_prompt": ({"asked": [([1, *PROMPT], CALL), ASKED[1]]}, {"TOK002"}),
    "no_turns_other_answer": (
        {"turns": TURNS[:2], "asked": [(PROMPT, [10, 11, 13])], "with_turns": False, "tags": {"generated": 3}},
        {"TOK002"},
    ),
    "no_turns_more_generated": (
        {"turns": TURNS[:2], "asked": [], "with_turns": False, "tags": {"generated": 4}},
        {"MSK006"},
    ),
    "tag_counts_otherwise": ({"tags": {"generated": 6}}, {"MSK006"}),
    "left_out_without_a_reason": ({"mask": [0] * 7}, {"MSK003", "MSK004"}),
    "observation_trains": ({"mask": [1] * 7}, {"MSK003"}),
}


@pytest.mark.parametrize("way", ["plain", *LAWFUL])
def test_lawful_ways_are_silent(failed, way):
    """What an agent loop or an engine may do breaks no code."""
    assert failed[way] == set()


@pytest.mark.parametrize("way", BROKEN)
def test_their_neighbours_are_not(failed, way):
    """The same without being declared, or with one token changed, is seen."""
    assert failed[way] == BROKEN[way][1]
