"""Rule rewards: the right scorer for a row, its score, and one line when there is none."""

from __future__ import annotations

import asyncio
import threading

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from lineage import hooks
from lineage.fingerprint import canonical_json, fingerprint_bytes
from lineage.hooks import UserError
from lineage.trainer.config import compose
from lineage.trainer.protocol import DataProto, nested_from_list, object_array, valid_mask
from lineage.trainer.reward import (
    SCORERS,
    RewardError,
    RewardLoopManager,
    RewardLoopWorker,
    load_scorer,
    reward_manager,
    scorer_of,
)
from lineage.trainer.reward.loop import record_own_score
from lineage.trainer.reward.registry import DATA_SOURCES
from lineage.trainer.tasks import make_rows

CUSTOM = """
async def slow(data_source, solution_str, ground_truth, extra_info):
    return {"score": len(solution_str), "note": "kept"}

def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    return (solution_str == ground_truth) + bonus + extra_info.get("more", 0)

def nothing(**arguments):
    return None
"""


def row(source="builtin/add", truth="5", **extra):
    """A dataset row as the agent loop has it."""
    truth_of = {"style": "rule", "ground_truth": truth}
    return {"data_source": source, "reward_model": truth_of, "extra_info": extra, "index": 3}


@pytest.fixture
def score(tokenizer):
    """Scores a text against a row with overrides of the reward section."""

    def run(text, a_row, *overrides):
        manager = reward_manager(compose([f"reward.{override}" for override in overrides]).reward, tokenizer)
        return asyncio.run(RewardLoopWorker(manager).compute_score("u_0_0", tokenizer(text)["input_ids"], a_row)).score

    return run


@pytest.fixture
def custom(tmp_path):
    """Override that names the user's own file."""
    path = tmp_path / "mine.py"
    path.write_text(CUSTOM)
    return f"custom_reward_function.path={path}"


def test_special_tokens_are_not_scored(score):
    """The end-of-sequence token is no part of the answer."""
    assert score("5<|im_end|>", row()) == 1.0


@pytest.mark.parametrize(("text", "expected"), [(" 5 ", 1.0), ("5.", 0.0), ("", 0.0)])
def test_exact_match(score, text, expected):
    """The built-in sum is right or wrong, spaces at the ends aside."""
    assert score(text, row()) == expected


@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [
        ("The answer is -4.", "-4", 1.0),
        ("so it is \\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("The answer is 3.", "-4", 0.0),
        ("no idea", "-4", 0.0),
        ("", "-4", 0.0),
    ],
)
def test_math_verify_reads_the_answer_out_of_a_sentence(score, text, truth, expected):
    """A number or an expression anywhere in the answer is compared by value."""
    assert score(text, row("openai/gsm8k", truth)) == expected


def test_math_verify_scores_the_same_in_a_thread():
    """Off the main thread, where its signal is forbidden, the score is the same and not silently 0."""
    found: list[float] = []
    arguments = {"data_source": "s", "solution_str": "it is 12", "ground_truth": "12", "extra_info": {}}
    thread = threading.Thread(target=lambda: found.append(SCORERS["math_verify"](**arguments)))
    thread.start()
    thread.join()
    assert found == [1.0]


@pytest.mark.slow
def test_reasoning_gym_rows_are_scored_by_kind(score):
    """Arithmetic goes to math-verify, other tasks to their own scorer."""
    (sum_row,) = make_rows("reasoning_gym:basic_arithmetic", 1, seed=1)
    (letters,) = make_rows("reasoning_gym:letter_counting", 1, seed=1)
    assert scorer_of(sum_row["data_source"]) is SCORERS["math_verify"]
    assert scorer_of(letters["data_source"]) is SCORERS["reasoning_gym"]
    assert score(f"It is {sum_row['reward_model']['ground_truth']}.", sum_row) == 1.0
    assert score(letters["reward_model"]["ground_truth"], letters) == 1.0


def test_every_known_source_has_a_registered_scorer():
    """The table of data sources names only scorers that exist."""
    assert set(DATA_SOURCES.values()) <= set(SCORERS)


def test_unknown_source_lists_the_known(score):
    """A row nobody can score is one line with the known sources and the two ways to choose."""
    with pytest.raises(RewardError) as caught:
        score("5", row("mine/own"))
    assert "'mine/own'" in str(caught.value)
    assert "openai/gsm8k" in str(caught.value)
    assert "reward.scorer" in str(caught.value)
    assert isinstance(caught.value, UserError)


def test_a_named_scorer_takes_every_row(score):
    """reward.scorer overrules the data source."""
    assert score("5", row("mine/own"), "scorer=exact_match") == 1.0


def test_unknown_scorer_and_manager_name_what_there_is(tokenizer):
    """A misspelt scorer gets the nearest, a manager the list."""
    with pytest.raises(RewardError, match="did you mean exact_match"):
        load_scorer(compose(["reward.scorer=exact_matc"]).reward)
    with pytest.raises(RewardError, match="known: naive"):
        reward_manager(compose(["reward.reward_manager=dapo"]).reward, tokenizer)


def test_custom_function_has_verls_signature(score, custom):
    """The user's function gets verl's arguments and its own keyword arguments."""
    assert score("5", row(more=2), custom) == 3.0
    assert score("6", row(), custom, "custom_reward_function.reward_kwargs.bonus=0.25") == 0.25


def test_custom_function_may_be_async_and_return_a_dict(score, custom):
    """A coroutine is awaited, and a dict's score taken."""
    assert score("four", row(), custom, "custom_reward_function.name=slow") == 4.0


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["custom_reward_function.name=absent"], "no function 'absent'; it has: slow, compute_score, nothing"),
        (["custom_reward_function.name=nothing"], "nothing returned None: a number or a dict with 'score'"),
    ],
)
def test_a_custom_function_that_gives_no_score_is_named(score, custom, overrides, expected):
    """An absent function, or one that returns no score, is one line."""
    with pytest.raises(RewardError) as caught:
        score("5", row(), custom, *overrides)
    assert expected in str(caught.value)


@pytest.mark.parametrize("value", ["nan", "-inf"])
def test_a_score_that_is_no_finite_number_is_taken_and_said(score, tmp_path, caplog, value):
    """As in verl; the checks see what becomes of it, and a warning names the function."""
    path = tmp_path / "mine.py"
    path.write_text(f"def compute_score(**arguments):\n    return float('{value}')\n")
    score("5", row(), f"custom_reward_function.path={path}")
    (record,) = caplog.records
    assert record.getMessage() == f"compute_score returned {value}: no advantage of its group is a number"


def test_a_custom_file_that_cannot_be_loaded_is_named(score, tmp_path):
    """A missing file and one that fails to import are one line with the path."""
    with pytest.raises(RewardError, match=r"absent\.py: no such file"):
        score("5", row(), f"custom_reward_function.path={tmp_path / 'absent.py'}")
    (tmp_path / "broken.py").write_text("import nowhere_at_all")
    with pytest.raises(RewardError, match=r"broken\.py: ModuleNotFoundError"):
        score("5", row(), f"custom_reward_function.path={tmp_path / 'broken.py'}")


def test_a_row_without_ground_truth_is_named(score):
    """The line gives the row's number and source."""
    with pytest.raises(RewardError, match=r"row 3 of builtin/add has no reward_model\.ground_truth"):
        score("5", {**row(), "reward_model": {}})


def test_a_ground_truth_that_is_no_mathematics_is_named(score):
    """math_verify refuses a ground truth it cannot read rather than scoring every answer 0."""
    with pytest.raises(RewardError, match="cannot read the ground truth 'a cat'"):
        score("5", row("openai/gsm8k", "a cat"))


# ------------------------------------------------------------------------------------------------- colocated rewards


def padded(tokenizer, texts, rows):
    """Responses as ``compute_rm_score`` gets them: prompts of unequal length on the left, responses on the right."""
    responses = [torch.tensor(tokenizer(text)["input_ids"]) for text in texts]
    prompts = [torch.arange(1, 2 + place) for place in range(len(texts))]
    nested = {"prompts": nested_from_list(prompts), "responses": nested_from_list(responses)}
    data = DataProto.from_tensordict(TensorDict(nested, batch_size=[len(texts)]))
    width, prompt_lens = data.batch["prompts"].shape[1], torch.tensor([len(row) for row in prompts])
    mask = valid_mask(prompt_lens, width, side="left"), data.batch["responses"] != 0
    data.batch["attention_mask"] = torch.cat(mask, dim=1).long()
    for name in ("data_source", "reward_model", "extra_info"):
        data.non_tensor_batch[name] = object_array([row[name] for row in rows])
    return data


@pytest.fixture(scope="module")
def naive(tokenizer):
    """The default reward manager."""
    return reward_manager(compose([]).reward, tokenizer)


@pytest.fixture
def score_batch(tokenizer):
    """Scores texts against rows in one batch."""

    def run(texts, rows, *overrides):
        manager = reward_manager(compose([f"reward.{override}" for override in overrides]).reward, tokenizer)
        data = padded(tokenizer, texts, rows)
        return asyncio.run(RewardLoopManager(manager, colocated=True).compute_rm_score(data))

    return run


def test_a_batch_is_scored_on_the_last_token_of_each_response(score_batch):
    """Padding is not decoded, and each row's score stands where its response ends."""
    result = score_batch(["5", "five 5", "55"], [row(), row(), row(truth="55")])
    assert result.batch["rm_scores"].tolist() == [[1, 0, 0, 0, 0, 0], [0] * 6, [0, 1, 0, 0, 0, 0]]
    assert result.meta_info["reward_extra_keys"] == ["score", "acc"]
    assert result.non_tensor_batch["acc"].tolist() == [1.0, 0.0, 1.0]


@given(st.lists(st.text("0123456789", min_size=1, max_size=9), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_a_batch_scores_as_the_agent_loop_does(naive, tokenizer, texts):
    """Row by row the colocated path gives the session's score, whatever the lengths beside it."""
    batch = padded(tokenizer, texts, [row()] * len(texts))
    result = asyncio.run(RewardLoopManager(naive, colocated=True).compute_rm_score(batch))
    alone = [asyncio.run(naive.run_single(tokenizer(text)["input_ids"], row())).score for text in texts]
    assert result.batch["rm_scores"].sum(dim=1).tolist() == alone


def test_who_scores_is_one_of_the_two(naive):
    """A colocated manager has no scorer for the agent loop."""
    assert RewardLoopManager(naive, colocated=True).session_scorer is None
    assert RewardLoopManager(naive, colocated=False).session_scorer is not None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("breaks", "the scorer of a row of builtin/add raised ZeroDivisionError: division by zero"),
        ("differs", "the scorer returned score for one row and note, score for another"),
    ],
)
def test_a_batch_that_cannot_be_scored_is_one_line(score_batch, tmp_path, name, expected):
    """A function that raises, or says more of one row than of another, ends the run with its name for it."""
    path = tmp_path / "mine.py"
    path.write_text(
        "def breaks(**arguments):\n    return 1 / 0\n\n"
        "def differs(solution_str, **arguments):\n"
        "    return {'score': 1.0} if solution_str == '5' else {'score': 0.0, 'note': 'long'}\n"
    )
    with pytest.raises(RewardError) as caught:
        score_batch(
            ["5", "55"], [row()] * 2, f"custom_reward_function.path={path}", f"custom_reward_function.name={name}"
        )
    assert expected in str(caught.value)


COLOCATED = "reward.reward_model.enable=true"
TWO_OUTPUTS = (
    "actor_rollout_ref.rollout.agent.default_agent_loop=draft_revise_agent",
    "data.train_batch_size=5",
    "trainer.total_training_steps=1",
)


@pytest.fixture(scope="module")
def colocated(traced_run):
    """A padded run of sessions with two outputs, scored after sampling."""
    return traced_run(COLOCATED, *TWO_OUTPUTS)


@pytest.mark.slow
def test_a_colocated_run_checks_clean(colocated):
    """No code fails, and those about scores see them: the padding rows were added after the scores, and have none."""
    kinds = colocated.judged()
    assert "fail" not in kinds.values()
    assert {kinds[code] for code in ("REW001", "REW002", "REW003", "REW006", "PAD001", "QUE003")} == {"pass"}


def test_colocated_scores_are_made_after_sampling_and_written_by_key(colocated):
    """Between sample and balance: read jagged, padded, scored row by row, cut back and put under the sampled keys."""
    rows = colocated.select(global_steps=1)
    order = list(
        dict.fromkeys(row["stage"] for row in rows if row["stage"] in ("rollout", "sample", "reward", "balance"))
    )
    assert order == ["rollout", "sample", "reward", "balance"]
    assert not [row for row in rows if row["stage"] == "rollout" and row["field"] == "rm_scores"]
    sampled = colocated.select(global_steps=1, stage="sample", op="produce", field="key")[0]["key"]
    scores = [row for row in rows if row["stage"] == "reward" and row["field"] == "rm_scores"]
    assert [(row["op"], row["layout"]) for row in scores] == [
        ("score", "dense"),
        ("unpad", "jagged"),
        ("produce", "jagged"),
    ]
    assert all(row["key"] == sampled for row in scores)
    assert scores[0]["producer"] == "RewardLoopManager.compute_rm_score"
    assert scores[2]["consumer"] == "PPOTrainer._compute_advantage"
    read = [
        row for row in rows if row["stage"] == "advantage" and row["op"] == "consume" and row["field"] == "rm_scores"
    ]
    producers = {key: row["producer"] for row in read for key in row["key"]}
    assert {producers[key] for key in sampled} == {"PPOTrainer._compute_reward_colocate"}


@pytest.mark.slow
def test_every_output_is_scored_and_the_advantage_takes_the_last(colocated, traced_run):
    """Drafts get scores of their own; the update is that of the agent loop's scores, bit for bit."""
    in_loop = traced_run(*TWO_OUTPUTS)
    assert torch.equal(colocated.weights(), in_loop.weights())
    (scored,) = colocated.select(global_steps=1, stage="reward", op="score")
    by_key = dict(zip(scored["key"], scored["sum"], strict=True))
    sessions = [key.rpartition("_")[0] for key in by_key if key.endswith("_1")]
    assert len(by_key) == 2 * len(sessions) == 20
    assert any(by_key[f"{session}_0"] != by_key[f"{session}_1"] for session in sessions)


def test_what_the_scorer_says_beside_the_score_is_written_by_key(colocated):
    """verl's reward_extra_keys become fields of the rows."""
    (extra,) = colocated.select(global_steps=1, stage="reward", op="produce", field="acc")
    (scored,) = colocated.select(global_steps=1, stage="reward", op="score")
    assert extra["key"] == scored["key"]
    assert extra["sum"] == pytest.approx(scored["sum"])


# ------------------------------------------------------------------------------------------------------- in the trace


def test_a_scorer_that_raises_is_in_the_trace(tokenizer, tmp_path):
    """The key is marked as failed and has no score: who writes one all the same contradicts the trace."""
    worker = RewardLoopWorker(reward_manager(compose([]).reward, tokenizer))
    with hooks.recording(tmp_path, config={}, run={}) as recorder:
        recorder.step(1)
        with pytest.raises(RewardError, match="no scorer for data_source"):
            asyncio.run(worker.compute_score("u_0_0", [1, 2], row("nobody/knows")))
    rows = pq.read_table(tmp_path / "trace.parquet").to_pylist()
    assert [(row["op"], row["key"], row["reason"]) for row in rows if row["op"] != "consume"] == [
        ("filter", ["u_0_0"], ["failed"])
    ]


def test_what_the_manager_read_is_in_the_trace(naive, tokenizer, tmp_path, monkeypatch):
    """Not what it was given: a manager that scores another text, or by another truth, is seen."""
    run_single = type(naive).run_single
    other = {**row(), "reward_model": {"ground_truth": "7"}}
    monkeypatch.setattr(type(naive), "run_single", lambda self, ids, _: run_single(self, ids[:1], other))
    ids = tokenizer("55")["input_ids"]
    with hooks.recording(tmp_path, config={}, run={}) as recorder:
        recorder.step(1)
        asyncio.run(RewardLoopWorker(naive).compute_score("u_0_0", ids, row()))
    rows = {said["field"]: said for said in pq.read_table(tmp_path / "trace.parquet").to_pylist()}
    assert (len(ids), rows["responses"]["valid_length"]) == (2, [1])
    (truth,) = fingerprint_bytes([canonical_json(other["reward_model"])])[0].tolist()
    assert rows["reward_model"]["fingerprint"] == [truth]


def test_a_score_of_the_loop_itself_is_in_the_trace(tmp_path):
    """A session that scores itself has a score event like any other."""
    with hooks.recording(tmp_path, config={}, run={}) as recorder:
        recorder.step(1)
        assert record_own_score("u_0_0", 0.5, row()) == 0.5
    (said,) = pq.read_table(tmp_path / "trace.parquet").to_pylist()
    assert (said["stage"], said["op"], said["key"], said["sum"]) == ("reward", "score", ["u_0_0"], [0.5])
    assert (said["producer"], said["data_source"]) == ("AgentLoop.run", ["builtin/add"])
