"""What a validation says: the figures of its answers by data source (verl ``process_validation_metrics``)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

Values = dict[str, list[float]]


@dataclass(frozen=True)
class Answer:
    """The final output of one validation session.

    Attributes:
        uid: prompt group.
        reward: its score.
        extra: what the scorer returned beside it.
        num_turns: messages of the conversation.
    """

    uid: str
    data_source: str
    reward: float
    extra: Mapping[str, Any] = field(default_factory=dict)
    num_turns: int = 0


def validation_metrics(answers: Sequence[Answer], expected: Mapping[tuple[str, str], int]) -> dict[str, float]:
    """Metrics by verl's names, each the mean over the prompts of a data source.

    ``val-core/<source>/<acc or reward>/mean@N`` and ``best@N/mean`` are what one looks at, N the sessions of a prompt;
    ``val-aux`` has the rest: other numbers of the scorer, ``std@N``, ``worst@n/mean``, and n = 2, 4, ... below N.
    ``best@n`` is the expected best of n draws from the N answers, with replacement: exact, where verl draws 1000 times.
    A session that failed counts as ``acc`` 0; ``acc_success_only`` leaves it out.

    Args:
        expected: sessions of each (data source, uid) that was asked.
    """
    groups: dict[tuple[str, str], Values] = {asked: defaultdict(list) for asked in expected}
    for answer in answers:
        values = groups[answer.data_source, answer.uid]
        values["reward"].append(answer.reward)
        for name, value in answer.extra.items():
            if isinstance(value, Real) and name != "reward":
                values[name].append(float(value))
    _count_failures(groups, expected)
    means: dict[str, dict[str, dict[str, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for (source, _), values in groups.items():
        for name, numbers in values.items():
            for metric, value in _group_metrics(numbers).items():
                means[source][name][metric].append(value)
    metrics: dict[str, float] = {}
    for source, by_name in means.items():
        core = "acc" if "acc" in by_name else "reward"
        for name, by_metric in by_name.items():
            most = max(map(_size, by_metric))
            for metric, values_of in by_metric.items():
                leads = name == core and metric.startswith(("mean", "best")) and _size(metric) == most
                section = "val-core" if leads else "val-aux"
                metrics[f"{section}/{source}/{name}/{metric}"] = sum(values_of) / len(values_of)
    return {**metrics, **_turns(answers)}


def best_of(values: Iterable[float], n: int) -> float:
    """Expected greatest of ``n`` draws with replacement from ``values``."""
    ranked = sorted(values)
    size = len(ranked)
    return sum(value * ((rank / size) ** n - ((rank - 1) / size) ** n) for rank, value in enumerate(ranked, start=1))


def _count_failures(groups: Mapping[tuple[str, str], Values], expected: Mapping[tuple[str, str], int]) -> None:
    with_acc = {source for (source, _), values in groups.items() if values.get("acc")}
    for (source, uid), values in groups.items():
        if source in with_acc:
            succeeded = values.get("acc", [])
            if succeeded:
                values["acc_success_only"] = list(succeeded)
            values["acc"] = [*succeeded, *[0.0] * (expected[source, uid] - len(succeeded))]


def _group_metrics(values: Sequence[float]) -> dict[str, float]:
    """Metrics of one prompt's answers."""
    size = len(values)
    mean = sum(values) / size
    metrics = {f"mean@{size}": mean}
    if size == 1:
        return metrics
    metrics[f"std@{size}"] = (sum((value - mean) ** 2 for value in values) / size) ** 0.5
    for n in _sizes(size):
        metrics[f"best@{n}/mean"] = best_of(values, n)
        metrics[f"worst@{n}/mean"] = -best_of((-value for value in values), n)
    return metrics


def _sizes(most: int) -> list[int]:
    """2, 4, 8 ... below ``most``, then ``most``."""
    powers = [2**power for power in range(1, most.bit_length()) if 2**power < most]
    return [*powers, most]


def _size(metric: str) -> int:
    return int(metric.partition("@")[2].partition("/")[0])


def _turns(answers: Sequence[Answer]) -> dict[str, float]:
    turns = [answer.num_turns for answer in answers]
    if not turns:
        return {}
    name = "val-aux/num_turns"
    return {f"{name}/min": float(min(turns)), f"{name}/max": float(max(turns)), f"{name}/mean": sum(turns) / len(turns)}
