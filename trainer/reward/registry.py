"""Which scorer judges a row: one named in the configuration, the user's own, or the one of its ``data_source``."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import inspect
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lineage.trainer.reward import scorers
from lineage.trainer.reward.errors import RewardError
from lineage.trainer.tasks import gym

# compute_score(data_source, solution_str, ground_truth, extra_info) -> number, or a dict with "score"
Scorer = Callable[..., float | dict[str, Any] | Awaitable[float | dict[str, Any]]]

SCORERS: dict[str, Scorer] = {
    "digits": scorers.digits,
    "exact_match": scorers.exact_match,
    "math_verify": scorers.math_verify,
    "reasoning_gym": scorers.reasoning_gym,
    "tool_use": scorers.tool_use,
}

# data_source -> scorer; verl's names for the data sets it knows
DATA_SOURCES: dict[str, str] = {
    "builtin/digits": "digits",
    "builtin/add": "exact_match",
    "builtin/calculator": "tool_use",
    "builtin/lookup": "tool_use",
    "openai/gsm8k": "math_verify",
    "lighteval/MATH": "math_verify",
    "DigitalLearningGmbH/MATH-lighteval": "math_verify",
    "HuggingFaceH4/MATH-500": "math_verify",
    "math_dapo": "math_verify",
}


def scorer_of(data_source: str | None) -> Scorer:
    """The scorer of a ``data_source``.

    Raises:
        RewardError: none is known for it; the message lists the known ones.
    """
    name = DATA_SOURCES.get(str(data_source))
    source, _, task = str(data_source).partition("/")
    if name is None and source == "reasoning_gym" and task:
        name = "math_verify" if task in gym.MATHEMATICAL else "reasoning_gym"
    if name is None:
        known = ", ".join([*DATA_SOURCES, "reasoning_gym/<task>"])
        raise RewardError(
            f"no scorer for data_source {data_source!r}; known: {known}; or set reward.scorer "
            f"({', '.join(SCORERS)}) or reward.custom_reward_function.path"
        )
    return SCORERS[name]


def load_scorer(config: DictConfig) -> Scorer | None:
    """The scorer the ``reward`` section names for every row, or None to choose by ``data_source``.

    Raises:
        RewardError: unknown scorer, or a custom function that cannot be loaded.
    """
    custom = config.custom_reward_function
    if custom.path:
        function = _load_function(Path(custom.path).expanduser(), custom.name)
        return functools.partial(function, **OmegaConf.to_container(custom.reward_kwargs))
    if config.scorer is None:
        return None
    if config.scorer not in SCORERS:
        near = difflib.get_close_matches(config.scorer, SCORERS, n=1)
        hint = f": did you mean {near[0]}?" if near else f"; known: {', '.join(SCORERS)}"
        raise RewardError(f"reward.scorer={config.scorer} is unknown{hint}")
    return SCORERS[config.scorer]


def _load_function(path: Path, name: str) -> Scorer:
    """A function of a Python file.

    Raises:
        RewardError: no such file, an error in it, or no such function (with those it has).
    """
    where = f"reward.custom_reward_function.path={path}"
    if not path.is_file():
        raise RewardError(f"{where}: no such file")
    spec = importlib.util.spec_from_file_location(f"custom_reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise RewardError(f"{where}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise RewardError(f"{where}: {type(error).__name__}: {error}") from error
    functions = [key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_"]
    function = getattr(module, name, None)
    if not callable(function):
        raise RewardError(f"{where} has no function {name!r}; it has: {', '.join(functions) or 'none'}")
    return function


def arguments_of(row: Mapping[str, Any], solution_str: str) -> dict[str, Any]:
    """verl's ``compute_score`` arguments of a dataset row and its answer.

    Raises:
        RewardError: the row has no ``reward_model.ground_truth``.
    """
    reward_model = row.get("reward_model") or {}
    if "ground_truth" not in reward_model:
        raise RewardError(f"row {row.get('index')} of {row.get('data_source')} has no reward_model.ground_truth")
    return {
        "data_source": row.get("data_source"),
        "solution_str": solution_str,
        "ground_truth": reward_model["ground_truth"],
        "extra_info": dict(row.get("extra_info") or {}),
    }
