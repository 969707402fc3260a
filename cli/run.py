"""``lineage run``: train with tracing on, check the trace, say what to do next."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lineage.checks.verdict import ExitCode
from lineage.cli.extras import need_extra
from lineage.cli.json_text import print_json
from lineage.cli.places import LATEST_RUN, RUNS
from lineage.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from rich.console import Console

    from lineage.checks.gate import Gate

SCORE = "critic/score/mean"

# group -> its keys that matter first; `--cfg job` prints them all
CONFIG_GROUPS: dict[str, tuple[str, ...]] = {
    "data": ("train_files", "val_files", "train_batch_size", "max_prompt_length", "max_response_length", "truncation"),
    "actor_rollout_ref.model": ("path",),
    "actor_rollout_ref.actor": ("ppo_mini_batch_size", "ppo_epochs", "use_kl_loss", "kl_loss_coef", "clip_ratio"),
    "actor_rollout_ref.actor.optim": ("lr", "weight_decay", "lr_warmup_steps", "lr_scheduler_type"),
    "actor_rollout_ref.rollout": ("name", "n", "temperature", "top_p", "top_k"),
    "actor_rollout_ref.ref": ("log_prob_micro_batch_size_per_gpu",),
    "algorithm": ("adv_estimator", "norm_adv_by_std_in_grpo"),
    "reward": ("scorer", "reward_manager"),
    "reward.custom_reward_function": ("path", "name"),
    "trainer": (
        "total_training_steps",
        "n_gpus_per_node",
        "n_ranks",
        "device",
        "logger",
        "save_freq",
        "resume_mode",
        "test_freq",
        "seed",
    ),
    "trainer.lineage": ("on_violation",),
    "ray_kwargs": ("ray_init",),
    "trace": ("enabled", "every", "keep_steps", "reuse", "sidecar", "weights"),
}

EXPERIMENTS = (
    "bypass",
    "dynamic_batch",
    "failures",
    "kl_in_reward",
    "lora_ref",
    "merged_steps",
    "multi_output",
    "reward_colocated",
    "tools",
)

HELP = (
    "Train with tracing on, then check the trace.\n\n"
    "OVERRIDES are verl's dotted keys, as Hydra reads them: data.train_batch_size=16. "
    "model.X and rollout.X are short for actor_rollout_ref.model.X and actor_rollout_ref.rollout.X.\n\n"
    "+experiment=NAME takes a named set of them, anywhere in the line; keys typed beside it win. NAME is "
    f"{', '.join(EXPERIMENTS)}, a list such as [tools,lora_ref], or the path of a YAML file of your own.\n\n"
    "Without any: the built-in tiny model on a built-in task, 3 steps, on this machine, no network.\n\n"
    "Configuration groups:\n\n"
    "\b\n" + "\n".join(f"{group}.{{{','.join(names)},...}}" for group, names in CONFIG_GROUPS.items())
)


@dataclass
class Summary:
    """What a run left behind.

    Attributes:
        run: run folder.
        steps: steps trained.
        scores: mean score of each step.
        trace: the trace, or None when the run was not traced.
        trace_bytes: its size.
        interrupted: ended by Ctrl-C.
        stopped: what broke in the last step, when ``trainer.lineage.on_violation=raise`` ended the run there.
    """

    run: str
    steps: int
    scores: list[float]
    trace: str | None = None
    trace_bytes: int = 0
    interrupted: bool = False
    stopped: str | None = None


def run_command(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, verl's dotted names.", show_default=False)
    ] = None,
    cfg: Annotated[
        str | None, typer.Option("--cfg", help="Print the resolved configuration (job) and stop.", metavar="job")
    ] = None,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print the verdict only.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON, the report on stderr.")] = False,
) -> None:
    # Typer shows HELP (below) as the docstring. Raises UserError for a configuration, dataset, model or reward that
    # cannot run, and typer.Exit with 0 (trained and clean), what the check says, or 130 after Ctrl-C.
    if cfg not in (None, "job"):
        raise UserError(f"--cfg {cfg} is not known; --cfg job prints the resolved configuration")
    need_extra("train", "lineage run")
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, stderr=as_json, quiet=quiet)
    config, lines = _configuration(overrides or [])
    if cfg == "job":
        from lineage.trainer.config import to_yaml

        typer.echo(to_yaml(config), nl=False)
        return
    if config.mode == "ray":
        need_extra("ray", "mode=ray")
    for line in lines:
        console.print(line, markup=False)
    from lineage.cli.gate import check_trace, project_gate  # what judges is loaded when it is needed

    gate = project_gate()
    summary = _run(config, console, gate)
    if as_json:
        print_json(asdict(summary), indent=None)
    else:
        _print_summary(summary, console)
    if summary.interrupted:
        raise typer.Exit(ExitCode.INTERRUPTED)
    if summary.trace is None:
        return
    code = check_trace(Path(summary.trace), gate, quiet=quiet, as_json=as_json)
    if summary.stopped is not None and code != ExitCode.VIOLATIONS:
        # the check of the trace could not say it: it is incomplete, or cannot be read
        print(summary.stopped, file=sys.stderr)
        code = ExitCode.VIOLATIONS
    _print_next(summary.trace, console)
    raise typer.Exit(code)


run_command.__doc__ = HELP


def _configuration(overrides: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """The validated configuration and what to say about it, a line each."""
    from lineage.trainer.config import adapt_to_mode, compose, validate_config

    config = compose(overrides)
    notes = adapt_to_mode(config, overrides)
    warnings = [f"warning: {line}" for line in validate_config(config)]
    return config, [*notes, *warnings]


def _run(config: DictConfig, console: Console, gate: Gate) -> Summary:
    """Train in a run folder of its own."""
    from lineage.trainer.quiet import quiet_libraries

    quiet_libraries()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    from lineage.cli.training import Training, train_here, train_on_ray
    from lineage.run import TRACE_FILE, new_run_folder
    from lineage.trainer.config import loggers, resolved, save
    from lineage.trainer.models import find_model, is_made
    from lineage.trainer.tracking.loggers import Tracking
    from lineage.trainer.tracking.trackers import Experiment, need_modules

    need_modules(loggers(config))
    path = config.actor_rollout_ref.model.path
    if not is_made(path):
        console.print(f"making model.path={path} in the cache, once", markup=False)
    model = find_model(path, config.actor_rollout_ref.model.tokenizer_path)
    folder = new_run_folder(RUNS)
    save(config, folder)
    off = _why_untraced(config)
    console.print(f"run {folder}" + (f", untraced: {off}" if off else ""), markup=False)
    facts = {
        "framework": "lineage.trainer",
        "mode": config.mode,
        "seed": config.trainer.seed,
        "model": path,
        "model_hash": model.model_hash(),
        "tokenizer_hash": model.tokenizer_hash(),
    }
    experiment = Experiment(folder, config.trainer.project_name, config.trainer.experiment_name, resolved(config))
    try:
        with Tracking(loggers(config), experiment, console) as tracking:
            train = train_on_ray if config.mode == "ray" else train_here
            ended = train(Training(config, folder, facts, off is None, tracking, console, gate))
    except UserError:
        if not _is_latest(folder):
            shutil.rmtree(folder, ignore_errors=True)  # it never began: the last run stays the latest
        raise
    steps, scores = tracking.steps, tracking.values(SCORE)
    summary = Summary(str(folder), steps, scores, interrupted=ended.interrupted, stopped=ended.stopped)
    if off is None:
        trace = folder / TRACE_FILE
        # a trace that could not be compacted stays in parts, and the folder is what a reader opens
        summary.trace = str(trace if trace.exists() else folder)
        summary.trace_bytes = sum(file.stat().st_size for file in _files(Path(summary.trace)))
    return summary


def _is_latest(folder: Path) -> bool:
    return LATEST_RUN.resolve() == folder.resolve()


def _why_untraced(config: DictConfig) -> str | None:
    from lineage import hooks

    if hooks.disabled():
        return "LINEAGE_DISABLED is set"
    return None if config.trace.enabled else "trace.enabled=false"


def _print_summary(summary: Summary, console: Console) -> None:
    word = "interrupted after" if summary.interrupted else "trained"
    scores = "" if not summary.scores else f", score {' '.join(f'{score:.3f}' for score in _ends(summary.scores))}"
    console.print(f"{word} {summary.steps} steps{scores}", markup=False)
    if summary.stopped is not None:
        console.print(f"stopped by trainer.lineage.on_violation=raise: {summary.run}", markup=False)
    if summary.trace is not None:
        console.print(f"trace {summary.trace} ({summary.trace_bytes / 1e6:.2f} MB)", markup=False)


def _print_next(trace: str, console: Console) -> None:
    query = "select stage, field, producer, consumer, count(*) from rows group by all"
    console.print(f'next: lineage check {trace}\n      lineage sql {trace} "{query}"', markup=False)


def _ends(scores: Sequence[float], most: int = 12) -> Sequence[float]:
    """All the scores, or of a long run evenly spaced ones, the last among them."""
    if len(scores) <= most:
        return scores
    places = [round(place * (len(scores) - 1) / (most - 1)) for place in range(most)]
    return [scores[place] for place in places]


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
