"""Random configurations: every one is valid, and together they reach every path of the step."""

from __future__ import annotations

import random

from lineage.trainer.config import compose, validate_config
from lineage.trainer.faults.configurations import LOOPS, draw
from lineage.trainer.faults.lab import FOLDER, OVERRIDES


def test_what_is_drawn_is_valid() -> None:
    """``validate_config`` accepts each, and a run that stops leaves a step to go on with."""
    source = random.Random(7)
    for _ in range(30):
        drawn = draw(source)
        lines = [line.replace(FOLDER, "somewhere") for line in (*OVERRIDES, *drawn.overrides)]
        config = compose(lines)
        validate_config(config)
        assert 0 <= drawn.resume_after < config.trainer.total_training_steps


def test_the_same_seed_draws_the_same() -> None:
    """A failing run can be drawn again from the seed the log names."""
    first, again = random.Random(3), random.Random(3)
    assert [draw(first) for _ in range(5)] == [draw(again) for _ in range(5)]


def test_a_campaign_reaches_every_path() -> None:
    """In five hundred draws: every loop, padding and none, several epochs and batches, resumes, an adapter, a dump."""
    source = random.Random(0)
    drawn = [draw(source) for _ in range(500)]
    lines = {line for one in drawn for line in one.overrides}
    values = {line.partition("=")[0].rpartition(".")[2]: set() for line in lines}  # type: dict[str, set[str]]
    for line in lines:
        key, _, value = line.partition("=")
        values[key.rpartition(".")[2]].add(value)
    for key, least in (("ppo_epochs", 2), ("parameter_sync_step", 2), ("loss_agg_mode", 3), ("lora_rank", 2)):
        assert len(values[key]) >= least, key
    assert {"+experiment=tools", "+experiment=multi_output"} <= lines
    assert any("flaky" in line for line in lines)
    assert len(LOOPS) == 4
    assert "dump" in "".join(values["rollout_data_dir"])
    assert {one.resume_after for one in drawn} >= {0, 1, 2}
