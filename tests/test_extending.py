"""docs/extending.md shows the files of docs/examples/extending/, and its command trains with all of them."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

import lineage

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text("utf-8")
EXAMPLE = ROOT / "docs" / "examples" / "extending"
FILES = sorted(path for path in EXAMPLE.iterdir() if path.is_file())


def overrides() -> list[str]:
    """What the page's one command sets."""
    (command,) = re.findall(r"^```sh\nlineage run (.*?)^```$", PAGE, re.M | re.S)
    return shlex.split(command.replace("\\\n", " "))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_page_shows_each_file_as_it_is(file: Path) -> None:
    """A block of the page is the file, word for word, and the command or a shown file names it."""
    blocks = re.findall(r"^```\w+\n(.*?)^```$", PAGE, re.M | re.S)
    text = file.read_text("utf-8")
    assert text in blocks
    assert any(file.name in block for block in blocks if block != text)


@pytest.mark.slow
def test_all_of_them_together_train_and_check_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of the page's command: no code fails, and every part of the user's own left its mark."""
    from lineage import hooks
    from lineage.trainer.config import compose, resolved, validate_config
    from lineage.trainer.grpo import PPOTrainerSync

    shutil.copytree(EXAMPLE, tmp_path / "mine", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path / "mine")
    monkeypatch.setattr(sys, "path", [*sys.path])  # the folder of a file.py:Class is appended to it
    config = compose([*overrides(), "trainer.rollout_data_dir=dump"])
    validate_config(config)

    async def train() -> PPOTrainerSync:
        trainer = PPOTrainerSync(config, folder=tmp_path)
        await trainer.init()
        await trainer.fit()
        return trainer

    with hooks.recording(tmp_path / "run", config=resolved(config)):
        trainer = asyncio.run(train())

    report = lineage.check(tmp_path / "run" / "trace.parquet")
    assert report.steps == 2
    assert {str(verdict.kind) for verdict in report.verdicts} <= {"pass", "vacuous"}
    assert type(trainer.agent_loop_manager).__name__ == "Dealer"
    assert len(trainer.agent_loop_manager.workers) == 2

    lines = [json.loads(line) for step in (1, 2) for line in Path(f"dump/{step}.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * 4 * 2
    for line in lines:
        said = line["right"] + 0.25 * line["called"] - 0.001 * len(line["output"])
        assert line["score"] == pytest.approx(said, abs=1e-6), line
    inputs = {line["input"] for line in lines}
    for begin in (
        "system\nlookup(key)user",
        "system\nlookup(key), calculator",
        "system\nA number, please.user",
        "system\nBe short.user",
    ):
        assert any(text.startswith(begin) for text in inputs), begin
    heard = "".join(line["output"] for line in lines)
    assert "<tool_response>Error executing tool 'lookup': no " in heard or "<tool_response>314<" in heard
    assert "user\nlouder" in heard
