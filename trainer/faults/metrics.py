"""Faults of metrics and dumps: what is logged is not what the step did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lineage.trainer.faults.registry import Seams, fault
from lineage.trainer.faults.seams import TOOLS
from lineage.trainer.protocol import KVBatchMeta, nested_to_padded

_DATA = "lineage.trainer.stages.metrics.compute_data_metrics"
_THROUGHPUT = "lineage.trainer.stages.metrics.compute_throughput_metrics"
_ENTROPY = "lineage.trainer.stages.log_prob.mean_entropy"
_MICRO = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"
_VALIDATION = ("data.val_files=builtin:add", "data.val_max_samples=3", "trainer.test_freq=1")
_DUMP = "trainer.rollout_data_dir={folder}/dump"


@fault("MET001", "metrics", reports=["openrlhf-ppo-kl-metric-from-ratio"])
def kl_of_the_ratio() -> Seams:
    """The logged KL is minus the mean of the ratio, where the log of the ratio is meant: it is near -1."""

    def compute(original: Any, *args: Any, **options: Any) -> Any:
        loss = original(*args, **options)
        return replace(loss, log_ratio=loss.log_ratio.exp())

    return {"lineage.trainer.ppo_loss.compute_policy_loss": compute}


@fault("MET001", "metrics", _MICRO, reports=["verl-kl-metric-last-micro-batch"])
def kl_of_the_last_micro_batch() -> Seams:
    """A dictionary of metrics is written over in the loop of micro-batches: the KL of the last one is logged."""

    def read(original: Any, parts: Sequence[Any]) -> dict[str, float]:
        return original(parts) | {"actor/ppo_kl": original(parts[-1:])["actor/ppo_kl"]}

    return {"lineage.trainer.training.loss_metrics": read}


@fault("MET001", "metrics", reports=["trl-metrics-mean-of-rank-means"])
def mean_of_rank_means() -> Seams:
    """Each rank averages its own tokens and the averages are averaged, whatever the ranks hold."""

    def compute(original: Any, rows: Any) -> dict[str, float]:
        half, means = len(rows.advantages) // 2, []
        for rank in (slice(None, half), slice(half, None)):
            mask = torch.cat(list(rows.response_mask[rank])).bool()
            means.append(float(torch.cat(list(rows.advantages[rank]))[mask].double().mean()))
        return original(rows) | {"critic/advantages/mean": sum(means) / len(means)}

    return {_DATA: compute}


@fault("MET001", "metrics", reports=["skyrl-avg-loss-includes-padding"])
def entropy_over_the_padded_tensor() -> Seams:
    """The logged entropy is a plain mean over the padded tensor: every padded position counts as 0."""

    def mean(_: Any, entropy: Tensor, mask: Tensor, mode: str) -> float:
        del mode
        return float((nested_to_padded(entropy) * nested_to_padded(mask)).double().mean())

    return {_ENTROPY: mean}


@fault("MET001", "metrics", *TOOLS, reports=["trl-length-metric-after-masking"])
def lengths_of_the_mask() -> Seams:
    """Response lengths are logged as sums of the mask, after observations and cut rows have been taken out of it."""

    def compute(original: Any, rows: Any) -> dict[str, float]:
        metrics = original(rows)
        names = ("mean", "max", "min")
        return metrics | {f"response_length/{name}": metrics[f"policy_length/{name}"] for name in names}

    return {_DATA: compute}


@fault("MET001", "metrics", "+experiment=kl_in_reward", reports=["slime-kl-mutated-in-place"])
def score_less_the_kl() -> Seams:
    """The penalty is taken off the scores in place: what is logged as the score is the reward less the KL."""
    return {_DATA: lambda original, rows: original(replace(rows, rm_scores=rows.token_level_rewards))}


@fault("MET001", "metrics", reports=["swift-overlong-metric-mask-shape"])
def metrics_of_the_kept_rows() -> Seams:
    """A filter of long answers is applied to the rows of one metric and not to those of the others."""

    def compute(original: Any, rows: Any) -> dict[str, float]:
        kept = [scores for scores in rows.rm_scores if len(scores) < rows.clipped_at] or rows.rm_scores[:1]
        return original(rows) | {"critic/score/mean": sum(float(scores.sum()) for scores in kept) / len(kept)}

    return {_DATA: compute}


@fault("MET001", "metrics")
def metrics_of_one_rank() -> Seams:
    """Rank 0 logs the statistics of its own rows for the whole batch."""

    def compute(original: Any, parts: Any, batch: KVBatchMeta, *rest: Any) -> dict[str, float]:
        own = batch.select_keys(batch.keys[: len(batch) // 2])
        return original(parts, own, *rest) | {"perf/total_num_tokens": _tokens(batch)}

    return {"lineage.trainer.grpo.compute_metrics": compute}


@fault("MET001", "metrics")
def mean_of_row_means() -> Seams:
    """The mean advantage is taken over rows, each of its own mean, and logged as the mean over tokens."""

    def compute(original: Any, rows: Any) -> dict[str, float]:
        pairs = zip(rows.advantages, rows.response_mask, strict=True)
        means = [float((row * mask).double().sum() / mask.sum().clamp(min=1)) for row, mask in pairs]
        return original(rows) | {"critic/advantages/mean": sum(means) / len(means)}

    return {_DATA: compute}


@fault("MET001", "validate", *_VALIDATION, reports=["verl-validation-grouped-by-text"])
def validation_grouped_by_text() -> Seams:
    """Answers are grouped by the text of their prompt: prompts that differ in their images are one group."""

    def judge(original: Any, answers: Sequence[Any], expected: Mapping[tuple[str, str], int]) -> dict[str, float]:
        (source, first), *_ = expected
        together = [replace(answer, uid=first) for answer in answers]
        return original(together, {(source, first): sum(expected.values())})

    return {"lineage.trainer.stages.validate.validation_metrics": judge}


@fault("MET001", "metrics", *_VALIDATION)
def validation_never_runs() -> Seams:
    """The interval of the validation is counted in epochs, and the run has less than one: it is never due."""
    return {"lineage.trainer.grpo.validation_is_due": lambda original, *args: False}


@fault("MET002", "metrics")
def throughput_of_the_padded_width() -> Seams:
    """The tokens of the step are its rows times the width they are padded to."""
    lengths: list[int] = []

    def remember(original: Any, rows: Any) -> dict[str, float]:
        lengths[:] = [
            int(prompt) + len(mask) for prompt, mask in zip(rows.prompt_lens, rows.response_mask, strict=True)
        ]
        return original(rows)

    def compute(original: Any, _: int, *rest: Any) -> dict[str, float]:
        return original((max(lengths) + 1) * len(lengths), *rest)

    return {_DATA: remember, _THROUGHPUT: compute}


@fault("MET002", "metrics")
def throughput_of_all_ranks() -> Seams:
    """The throughput of a rank is the tokens of all of them by the second: it is not divided by their number."""
    return {_THROUGHPUT: lambda original, tokens, seconds, _: original(tokens, seconds, 1)}


@fault("MET002", "metrics")
def throughput_of_responses() -> Seams:
    """Only the tokens that were generated are counted, though the prompts were computed too."""
    lengths: list[int] = []

    def remember(original: Any, rows: Any) -> dict[str, float]:
        lengths[:] = [len(mask) for mask in rows.response_mask]
        return original(rows)

    def compute(original: Any, _: int, *rest: Any) -> dict[str, float]:
        return original(sum(lengths), *rest)

    return {_DATA: remember, _THROUGHPUT: compute}


@fault(
    "MET003",
    "dump",
    *_VALIDATION,
    "trainer.validation_data_dir={folder}/validation",
    reports=["verl-uid-missing-in-validation-dump"],
)
def dump_without_keys() -> Seams:
    """The uid is built and not passed to the dump of a validation: its lines hold text and scores alone."""

    def line(original: Any, *args: Any) -> dict[str, Any]:
        return {name: value for name, value in original(*args).items() if name not in ("key", "uid")}

    return {"lineage.trainer.tracking.dump.Sample.line": line}


@fault("MET003", "dump", _DUMP)
def dump_in_another_order() -> Seams:
    """Texts and scores are dumped in the order of the batch, keys in that of the groups: lines belong to other keys."""

    def read(original: Any, *args: Any) -> list[Any]:
        samples = original(*args)
        keys = [sample.key for sample in samples]
        return [replace(sample, key=key) for sample, key in zip(samples, keys[1:] + keys[:1], strict=True)]

    return {"lineage.trainer.tracking.dump.read_samples": read}


def _tokens(batch: KVBatchMeta) -> float:
    return float(sum(tag["seq_len"] for tag in batch.tags if not tag["is_padding"]))
