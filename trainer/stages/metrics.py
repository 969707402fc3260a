"""The metrics stage: data, throughput and time of a step, over real rows."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lineage import hooks
from lineage.hooks import traced
from lineage.trainer.actor import fetch
from lineage.trainer.metrics import DataRows, StepTimer, compute_data_metrics, compute_throughput_metrics
from lineage.trainer.parts import Parts
from lineage.trainer.protocol import KVBatchMeta, lengths_of
from lineage.trainer.stages.fields import Metrics
from lineage.trainer.training import rows_of


@traced("metrics", component="PPOTrainer._compute_metrics")
def compute_metrics(
    parts: Parts, batch: KVBatchMeta, made: Mapping[str, float], timer: StepTimer, global_steps: int
) -> Metrics:
    """Every metric of the step: those its stages made, then data, throughput and time (verl ``_compute_metrics``)."""
    rewards = "token_level_rewards" if parts.config.algorithm.use_kl_in_reward else "rm_scores"
    names = ["advantages", "num_turns", "prompts", "response_mask", "responses", "returns", "rm_scores"]
    data = fetch(parts.queue, batch, [*dict.fromkeys([*names, rewards])])
    real = [row for row, tag in enumerate(batch.tags) if not tag["is_padding"]]

    def rows(name: str) -> list[Tensor]:
        column = rows_of(data[name])
        return [column[row] for row in real]

    seconds = timer.seconds.get("step", 0.0)
    tokens = sum(batch.tags[row]["seq_len"] for row in real)
    metrics = {
        **made,
        **compute_data_metrics(
            DataRows(
                rm_scores=rows("rm_scores"),
                token_level_rewards=rows(rewards),
                advantages=rows("advantages"),
                returns=rows("returns"),
                response_mask=rows("response_mask"),
                prompt_lens=lengths_of(data["prompts"])[real],
                num_turns=data["num_turns"][real],
                clipped_at=parts.response_length,
                prompts_clipped_at=parts.prompt_length,
            )
        ),
        **compute_throughput_metrics(tokens, seconds, parts.worker.get_data_parallel_size()),
        **timer.metrics(),
        "training/global_step": float(global_steps),
        "training/epoch": float(parts.stream.epoch),
    }
    hooks.current().metrics(metrics, attrs={"over": f"{len(batch)},{len(real)}"})
    return metrics
