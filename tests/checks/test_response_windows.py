"""What was cut from a sequence to its response, by the fingerprints of prefixes; the forms and limits of both."""

from __future__ import annotations

import numpy as np
import pytest

import lineage
from lineage.checks import check

PROMPT_LENS, RESPONSE_LENS = (3, 5), (4, 2)


def record(folder, starts, *, dtype=np.float32, steps=1, config=None):
    """Two rows scored over whole sequences, and cut to the response from ``starts`` on (relative to the right one).

    Args:
        starts: one of each step.
        dtype: of what was cut, in the last step.
        config: the run's configuration.
    """
    keys, lens = ["u_0_0", "u_1_0"], list(zip(PROMPT_LENS, RESPONSE_LENS, strict=True))
    rng = np.random.default_rng(0)
    with lineage.record(folder, config=config or {}) as recorder:
        for step in range(1, steps + 1):
            recorder.step(step)
            with recorder.stage("rollout", producer="worker") as stage:
                fields = {"prompts": PROMPT_LENS, "responses": RESPONSE_LENS, "input_ids": [p + r for p, r in lens]}
                stage.produce({name: [np.arange(size) for size in sizes] for name, sizes in fields.items()}, keys=keys)
            scored = [rng.normal(size=p + r).astype(np.float32) for p, r in lens]
            with recorder.stage("old_log_prob", producer="actor") as stage:
                stage.forward({"log_probs": scored}, keys=keys, span="sequence")
                start = starts[step - 1]
                made = [row[p - 1 + start :][:r] for row, (p, r) in zip(scored, lens, strict=True)]
                kept = dtype if step == steps else np.float32
                stage.produce({"old_log_probs": [row.astype(kept) for row in made]}, keys=keys, span="response")
    return folder


def verdict_of(folder, code):
    """What one code says."""
    return check(folder, select=[code]).verdicts[0]


def test_the_right_window_passes_and_a_moved_one_is_named(tmp_path):
    """Of three steps the one cut a token late and the one cut a token early fail, each row of them."""
    found = verdict_of(record(tmp_path, (0, 1, -1), steps=3), "LEN004")
    late = [(one.global_steps, one.expected, one.actual) for one in found.violations[:2]]
    assert late == [(2, "window [2, 6)", "window [3, 7)"), (2, "window [4, 6)", "window [5, 7)")]
    assert ([one.global_steps for one in found.violations], found.examined) == ([2, 2, 3, 3], 6)


@pytest.mark.parametrize(("dtype", "kind"), [(np.float64, "pass"), (np.float16, "vacuous")])
def test_values_made_narrower_are_not_judged(tmp_path, dtype, kind):
    """A wider copy has the same values; a narrower one has others, and it is no window that is wrong."""
    assert str(verdict_of(record(tmp_path, (0,), dtype=dtype), "LEN004").kind) == kind


def test_a_field_of_another_form_is_a_warning(tmp_path):
    """Another dtype than in the step before is no error."""
    found = verdict_of(record(tmp_path, (0, 0), dtype=np.float64, steps=2), "LEN007")
    said = [(one.severity, one.expected, one.actual) for one in found.violations]
    assert (str(found.kind), len(said)) == ("pass", 1)
    assert said[0][0] == "warning"
    assert "float32" in said[0][1]
    assert "float64" in said[0][2]


@pytest.mark.parametrize(
    ("limits", "kind"),
    [
        ({}, "vacuous"),
        ({"max_response_length": 4, "max_prompt_length": 5}, "pass"),
        ({"max_response_length": 3}, "fail"),
    ],
)
def test_limits_are_those_of_the_run(tmp_path, limits, kind):
    """Where a run declares no limit nothing is judged; a row as long as the limit is within it."""
    assert str(verdict_of(record(tmp_path, (0,), config={"data": limits}), "LEN005").kind) == kind


def answered(folder, rollout, *, budget=8, reason="length", turns=("policy",)):
    """A session of a run with a budget: a prompt of 3 tokens, and turns of 4 tokens, the last one requested.

    Args:
        rollout: ``actor_rollout_ref.rollout``.
        reason: why the request ended.
        turns: who wrote each, after the prompt.
    """
    config = {"data": {"max_response_length": budget}, "actor_rollout_ref": {"rollout": rollout}}
    with lineage.record(folder, config=config) as recorder:
        recorder.step(1)
        with recorder.stage("rollout", producer="worker") as stage:
            prompt, turn, response = np.arange(3), np.arange(4), np.tile(np.arange(4), len(turns))
            asked = {"prompts": [prompt], "responses": [turn]}
            stage.generate(asked, keys=["u_0_0"], columns={"finish_reason": [reason]})
            stage.produce({"prompts": [prompt], "responses": [response]}, keys=["u_0_0"])
            said = {"turn": list(range(len(turns) + 1)), "role": ["prompt", *turns]}
            said["start"] = [0, *(3 + 4 * number for number in range(len(turns)))]
            contents = {"turns": [prompt, *[turn] * len(turns)]}
            stage.produce(contents, keys=["u_0_0"] * (len(turns) + 1), entity="turn", columns=said)
    return str(verdict_of(folder, "LEN005").kind)


OWN_LOOP = {"agent": {"agent_loop_config_path": "loops.yaml"}}


@pytest.mark.parametrize(
    ("rollout", "said", "kind"),
    [
        ({}, {}, "fail"),
        ({}, {"reason": "stop"}, "pass"),
        ({}, {"reason": "abort"}, "pass"),
        ({}, {"budget": 4}, "pass"),
        ({}, {"turns": ("policy", "observation")}, "pass"),  # a turn of a conversation has what is left to it
        ({"max_model_len": 7}, {}, "pass"),  # prompt and response together
        ({"max_model_len": 12}, {}, "fail"),
        (OWN_LOOP, {}, "pass"),  # it may ask for less
        ({"agent": {"default_agent_loop": "mine"}}, {}, "pass"),
        ({}, {"budget": None}, "vacuous"),
    ],
)
def test_a_response_that_ended_by_length_has_its_whole_budget(tmp_path, rollout, said, kind):
    """As far as the run says what it was, and that its session asked for all of it."""
    assert answered(tmp_path, rollout, **said) == kind


SPOKEN = ("policy", "observation", "policy", "observation", "policy")


@pytest.mark.parametrize(
    ("limits", "own", "kind"),
    [
        ({"max_assistant_turns": 3, "max_user_turns": 2}, {}, "pass"),
        ({"max_assistant_turns": 2}, {}, "fail"),
        ({"max_user_turns": 1}, {}, "fail"),
        ({"max_assistant_turns": 0, "max_user_turns": None}, {}, "pass"),  # none
        ({"max_assistant_turns": 2}, OWN_LOOP, "pass"),
    ],
)
def test_a_conversation_keeps_its_limits(tmp_path, limits, own, kind):
    """Turns of the policy and answers to it, in a loop that has these limits."""
    assert answered(tmp_path, {"multi_turn": limits, **own}, budget=20, turns=SPOKEN) == kind
