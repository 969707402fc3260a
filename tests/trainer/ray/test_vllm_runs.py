"""``rollout.name=vllm`` end to end: ranks, the queue, and the real engine in processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

pytest.importorskip("vllm")

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

BLOCK = 128  # tokens of vLLM's cache on a CPU: no shorter prompt is ever found there
BASE = ("mode=ray", "trainer.n_ranks=2", "rollout.name=vllm", "data.max_prompt_length=256")


def lineage(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command, as a user types it."""
    command = [sys.executable, "-m", "lineage.cli", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=580, check=False)


@pytest.fixture
def long_prompts(tmp_path: Path) -> str:
    """Questions behind one preamble of more tokens than a block of the cache, of one character each."""
    return prompts_behind(tmp_path, "You will be given a digit and are to write it, and nothing else, as you can. " * 2)


def prompts_behind(folder: Path, preamble: str) -> str:
    """Rows of a task whose prompts all begin alike: the setting that takes them."""
    rows = [
        {
            "data_source": "builtin/digits",
            "prompt": [{"role": "user", "content": f"{preamble}Write {digit} again and again."}],
            "reward_model": {"style": "rule", "ground_truth": str(digit)},
        }
        for digit in range(10)
    ]
    path = folder / "long.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"data.train_files={path}"


def checked(folder: Path, *overrides: str) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """A run that ends in order: the rows of its trace, and by code what the checker says of it."""
    done = lineage(folder, "run", "--json", *BASE, *overrides)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    said = lineage(folder, "check", "--format", "json", "runs/latest")
    assert said.returncode == 0, said.stdout[-2000:]
    rows = pq.read_table(folder / json.loads(done.stdout)["trace"]).to_pylist()
    return rows, {each["code"]: each for each in json.loads(said.stdout)["verdicts"]}


def greatest(rows: list[dict[str, Any]], field: str, against: str) -> float:
    """The greatest difference of two log-probs of the same tokens."""
    pairs = [row for row in rows if row["op"] == "compare" and (row["field"], row["against"]) == (field, against)]
    assert pairs
    return max(value for row in pairs for value in row["absdiff_max"])


def test_a_run_checks_clean_and_its_log_probs_agree(tmp_path: Path, long_prompts: str) -> None:
    """Three steps of a tied model with prompts the cache would serve stale: every sync arrives, and shows."""
    rows, verdicts = checked(tmp_path, long_prompts)
    for code in ("LGP002", "TOK002", "VER002", "VER003", "VER007", "TOP003"):
        assert verdicts[code]["verdict"] == "pass"
        assert verdicts[code]["examined"] > 0
    assert greatest(rows, "old_log_probs", "rollout_log_probs") < 1e-3
    assert greatest(rows, "probe_log_probs", "probe") < 1e-3
    generated = [row for row in rows if row["op"] == "generate"]
    assert {row["producer"] for row in generated} == {"VLLMRollout.generate"}
    assert {row["process"] for row in generated} == {"rollout:0"}
    prompts = [length for row in generated if row["field"] == "prompts" for length in row["length"]]
    assert len(prompts) == 3 * 8 * 4
    assert min(prompts) > BLOCK
    sent, there = (
        [row for row in rows if row["op"] == "sync" and row["process"] == who] for who in ("actor:0", "rollout:0")
    )
    assert [row["weights"]["version"] for row in there] == [0, 1, 2, 3]
    assert [sorted(row["key"]) for row in there] == [sorted(row["key"]) for row in sent]
    assert all("lm_head.weight" in row["key"] for row in there)


def test_replicas_share_the_sessions(tmp_path: Path, long_prompts: str) -> None:
    """Each takes the weights and about half of the sessions; the layout says how many there are."""
    rows, _ = checked(tmp_path, long_prompts, "rollout.num_replicas=2", "trainer.total_training_steps=2")
    sessions = {
        who: [
            key
            for row in rows
            if row["op"] == "generate" and row["field"] == "prompts" and row["process"] == who
            for key in row["key"]
        ]
        for who in ("rollout:0", "rollout:1")
    }
    assert not set(sessions["rollout:0"]) & set(sessions["rollout:1"])
    assert {len(keys) for keys in sessions.values()} == {2 * 8 * 4 // 2}
    for who in sessions:
        synced = [row for row in rows if row["op"] == "sync" and row["process"] == who]
        assert [row["weights"]["version"] for row in synced] == [0, 1, 2]
    assert {row["topology"]["rollout_dp"] for row in rows if row["topology"]} == {2}
