"""Made tasks: the same seed gives the same rows in verl's prompt schema."""

from __future__ import annotations

import asyncio
import builtins

import pytest

from lineage.hooks import MissingExtraError
from lineage.trainer.reward import scorer_of
from lineage.trainer.tasks import TaskError, builtin, gym, is_task, make_rows
from lineage.trainer.tools import Calculator, Lookup

TASKS = ["builtin:digits", "builtin:add", "builtin:calculator", "builtin:lookup", "reasoning_gym:basic_arithmetic"]


@pytest.mark.parametrize("name", TASKS)
def test_rows_follow_the_prompt_schema(name):
    """Every row has a data source, a message list, a ground truth and its index."""
    rows = make_rows(name, 5, seed=1)
    assert [row["extra_info"]["index"] for row in rows] == list(range(5))
    for row in rows:
        assert row["data_source"] == name.replace(":", "/")
        assert [message["role"] for message in row["prompt"]] == ["user"]
        assert row["prompt"][0]["content"]
        assert row["reward_model"]["ground_truth"]


@pytest.mark.parametrize("name", TASKS)
def test_the_seed_decides_the_rows(name):
    """Equal seeds give equal rows, different seeds different ones."""
    assert make_rows(name, 8, seed=1) == make_rows(name, 8, seed=1)
    assert make_rows(name, 8, seed=1) != make_rows(name, 8, seed=2)


def test_the_source_has_its_own_number_of_rows():
    """Size -1 makes as many rows as the source holds by default."""
    assert len(make_rows("builtin:add", -1, seed=0)) == builtin.ROWS


@pytest.mark.parametrize(
    ("solution", "score"),
    [("7777", 1.0), ("12", 0.5), ("7a", 0.5), ("17", 0.75), ("abcd", 0.0), ("", 0.0), ("\u0667\u0667", 0.0)],
)
def test_digits_score_is_dense(solution, score):
    """Half for being a digit, half for being the right one, by share of characters; only ASCII digits count."""
    assert builtin.score_digits(solution, "7") == score


def test_gym_scores_its_own_answer_full():
    """The task's own scorer gives its answer 1 and no answer less."""
    (row,) = make_rows("reasoning_gym:letter_counting", 1, seed=3)
    entry = row["extra_info"]["entry"]
    assert gym.score("letter_counting", row["reward_model"]["ground_truth"], entry) == 1.0
    assert gym.score("letter_counting", "nonsense", entry) < 1.0


def test_mathematical_tasks_exist():
    """Every task scored by math-verify is one the package offers."""
    assert set(gym.names()) >= gym.MATHEMATICAL


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("builtin:digit", "did you mean builtin:digits?"),
        ("builtin:zzz", "known: add, calculator, digits, lookup"),
        ("reasoning_gym:basic_arithmetics", "did you mean reasoning_gym:basic_arithmetic"),
    ],
)
def test_unknown_task_names_the_nearest_or_all(name, expected):
    """An unknown task is one line with the nearest names, or the list when none is near."""
    with pytest.raises(TaskError) as caught:
        make_rows(name, 1, seed=0)
    assert expected in str(caught.value)


def test_missing_package_names_the_extra(monkeypatch):
    """Without reasoning-gym the error is the pip line."""
    real = builtins.__import__

    def refuse(name, *rest, **options):
        if name.startswith("reasoning_gym"):
            raise ImportError(name)
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingExtraError, match=r'pip install "rl-lineage\[tasks\]"'):
        make_rows("reasoning_gym:basic_arithmetic", 1, seed=0)


def test_is_task_knows_a_task_from_a_file():
    """A prefix and a colon make a task; a path does not."""
    assert is_task("builtin:digits")
    assert not is_task("builtin")
    assert not is_task("/data/train.parquet")
    assert not is_task("C:/train.parquet")


def ask(tool, kwargs, **arguments):
    """What a tool says in a call, given the row's ``tools_kwargs``."""

    async def call():
        instance_id, _ = await tool.create(**kwargs.get(tool.name, {}))
        return (await tool.execute(instance_id, arguments))[0].text

    return asyncio.run(call())


@pytest.mark.parametrize(
    ("task", "tool", "parameter"), [("calculator", Calculator(), "expression"), ("lookup", Lookup(), "key")]
)
def test_the_tool_knows_the_ground_truth(task, tool, parameter):
    """Every row goes to the tool agent, and its question put to the tool gives the ground truth."""
    for row in make_rows(f"builtin:{task}", 8, seed=2):
        extra = row["extra_info"]
        assert row["agent_name"] == "tool_agent"
        assert extra["need_tools_kwargs"] == bool(extra["tools_kwargs"])
        assert extra["interaction_kwargs"] == {}
        argument = row["prompt"][0]["content"].removesuffix("=?")
        assert ask(tool, extra["tools_kwargs"], **{parameter: argument}) == row["reward_model"]["ground_truth"]
        assert row["reward_model"]["ground_truth"] not in argument


CALL = '<tool_call>{"name": "lookup", "arguments": {"key": "pilak"}}</tool_call>'


@pytest.mark.parametrize(
    ("solution", "score"),
    [
        (f"{CALL}user\n<tool_response>681</tool_response>assistant\n681", 1.0),
        (f"{CALL}\nuser\n<tool_response>\n681\n</tool_response>\nassistant\n681\n", 1.0),
        (f"{CALL}user\n<tool_response>681</tool_response>assistant\n618", 0.5),
        (f"{CALL}user\n<tool_response>no key pilok</tool_response>assistant\n618", 0.25),
        (CALL, 0.25),
        ("681", 0.5),
        ('<tool_call>{"name": "calculator", "arguments": {"expression": "1"}}</tool_call>', 0.0),
        ('<tool_call>{"name": "lookup", "arguments": "pilak"}</tool_call>', 0.0),
        ('<tool_call>{"name": "lookup", "arguments": {"key": "pilak"}</tool_call>', 0.0),
        ("", 0.0),
    ],
)
def test_tool_use_score_is_dense(solution, score):
    """A quarter for a well-formed call, a quarter for the tool's right answer, half for the policy's."""
    assert scorer_of("builtin/lookup")("builtin/lookup", solution, "681", {}) == score
