"""The validate stage: the prompts of ``data.val_files`` through the training's own agent loop, in their own partition.

Its rows stand under their own stages (dataset, prompt, rollout, reward, sample, clear), of partition ``val``. It reads
the weights the rollout has, and what it draws from the process-wide generators (a scorer may) is undone: with it or
without it a run is the same.
"""

from __future__ import annotations

from pathlib import Path

from lineage import hooks
from lineage.hooks import traced
from lineage.trainer.actor import fetch
from lineage.trainer.advantage import final_outputs
from lineage.trainer.agent_loop import AgentLoopManager
from lineage.trainer.parts import Parts
from lineage.trainer.protocol import DataProto, KVBatchMeta
from lineage.trainer.replay_buffer import VALIDATION
from lineage.trainer.rng import kept_rng
from lineage.trainer.stages.fields import Metrics
from lineage.trainer.stages.prompts import ask_validation, register_prompts
from lineage.trainer.stages.reward import compute_reward_colocate
from lineage.trainer.stages.sample import sample_groups
from lineage.trainer.tracking.dump import Sample, read_samples, reward_extra_infos, write_samples
from lineage.trainer.validation import Answer, validation_metrics


def validation_is_due(parts: Parts, global_steps: int) -> bool:
    """True every ``trainer.test_freq`` steps, and at the last one."""
    every = parts.config.trainer.test_freq
    return every > 0 and (global_steps % every == 0 or global_steps == parts.total_training_steps)


@traced("validate", component="PPOTrainer._validate", consumer="PPOTrainer.fit", partition=VALIDATION)
async def validate(parts: Parts, manager: AgentLoopManager, global_steps: int) -> tuple[Metrics, list[Sample]]:
    """Ask every validation prompt ``val_kwargs.n`` times and judge the answers (verl ``_validate``).

    Args:
        manager: starts the sessions; the rollout must be awake.
        global_steps: the step after which it is; also the version of the weights that answer.

    Returns:
        ``val-core/*`` and ``val-aux/*`` metrics, and the answers as text.
    """
    assert parts.validation is not None  # validate_config asks for data.val_files
    answers: list[Answer] = []
    expected: dict[tuple[str, str], int] = {}
    samples: list[Sample] = []
    with kept_rng():
        for prompts in parts.validation.batches(global_steps):
            asked = ask_validation(parts, prompts, global_steps)
            expected.update(_expected(asked))
            register_prompts(parts, asked)
            manager.generate_sequences(asked)
            batch = await sample_groups(parts, manager, global_steps, VALIDATION, len(asked))
            if not batch.keys:
                continue  # every session of it failed
            if parts.reward.colocated:
                await _score(parts, batch, global_steps)
            answers += _final_answers(parts, batch)
            samples += read_samples(parts.queue, batch, parts.tokenizer)
            _clear(parts, batch)
    metrics = validation_metrics(answers, expected)
    hooks.current().metrics(metrics, attrs={"prompts": str(len(expected)), "answers": str(len(answers))})
    if parts.config.trainer.validation_data_dir:
        _dump(parts, samples, global_steps)
    return metrics, samples


def _expected(asked: DataProto) -> dict[tuple[str, str], int]:
    columns = asked.non_tensor_batch
    pairs = zip(columns["data_source"], columns["uid"], strict=True)
    return {(str(source), str(uid)): asked.meta_info["expected"] for source, uid in pairs}


async def _score(parts: Parts, batch: KVBatchMeta, global_steps: int) -> None:
    """A colocated reward model takes the rollout's place while it scores; the rollout then has the same weights."""
    parts.checkpoint_manager.sleep_replicas()
    await compute_reward_colocate(parts, batch)
    parts.checkpoint_manager.update_weights(global_steps)


def _final_answers(parts: Parts, batch: KVBatchMeta) -> list[Answer]:
    """The answer of each session: its last output."""
    rows = final_outputs(batch.keys, [False] * len(batch)).values()
    finals = batch.select_keys([batch.keys[row] for row in rows])
    data = fetch(parts.queue, finals, ["uid", "data_source", "rm_scores", "num_turns"])
    rewards = [float(row.double().sum()) for row in data["rm_scores"].unbind()]
    columns = (data[name].tolist() for name in ("uid", "data_source", "num_turns"))
    extras = reward_extra_infos(parts.queue, finals)
    return [
        Answer(str(uid), str(source), reward, extra, int(turns))
        for reward, uid, source, turns, extra in zip(rewards, *columns, extras, strict=True)
    ]


@traced("clear", component="PPOTrainer._validate")
def _clear(parts: Parts, batch: KVBatchMeta) -> None:
    parts.queue.kv_clear(keys=batch.keys, partition_id=batch.partition_id)


@traced("dump", component="PPOTrainer._validate")
def _dump(parts: Parts, samples: list[Sample], global_steps: int) -> None:
    folder = Path(parts.config.trainer.validation_data_dir).expanduser()
    write_samples(folder, global_steps, samples, "trainer.validation_data_dir")
