"""Polars, lazily, over the exploded lists."""

from __future__ import annotations

from pathlib import Path


def violations(path: Path, threads: int) -> dict[str, int]:
    import polars as pl
    from polars import col

    trace = pl.scan_parquet(path)
    uid = col("key").str.replace(r"_\d+_\d+$", "")
    where = ["global_steps", "key"]

    def facts(chosen: pl.Expr, *lists: str) -> pl.LazyFrame:
        return trace.filter(chosen).select("global_steps", "seq", "op", "partition", *lists).explode(*lists)

    def made(stage: str, op: str, field: str) -> pl.Expr:
        return (col("stage") == stage) & (col("op") == op) & (col("field") == field)

    spans = (col("entity") == "trajectory") & (col("span") == "response") & (col("layout") != "scalar")
    alignment = (
        facts(spans & (col("op") != "compare"), "key", "valid_length")
        .group_by(where)
        .agg(col("valid_length").min().alias("least"), col("valid_length").max().alias("most"))
        .filter(col("least") != col("most"))
    )
    sampled = facts(made("sample", "produce", "key"), "key").group_by("global_steps", uid).len("sessions")
    declared = facts(made("prompt", "produce", "uid"), "key", "expected")
    groups = declared.join(sampled, on=where, how="left").filter(col("sessions").fill_null(0) != col("expected"))
    used = col("op").is_in(["produce", "tag", "clear"]) | ((col("op") == "consume") & col("asked_n").is_not_null())
    keyed = col("entity").is_in(["trajectory", "prompt"]) & col("partition").is_not_null()
    acts = (
        facts(keyed & used, "key")
        .group_by("partition", "key")
        .agg(
            col("seq").filter(col("op").is_in(["produce", "tag"])).min().alias("first_put"),
            col("seq").filter(col("op") == "consume").min().alias("first_get"),
            col("seq").filter(col("op") != "clear").max().alias("last_use"),
            col("seq").filter(col("op") == "clear").min().alias("cleared"),
        )
    )
    order = acts.filter((col("first_get") < col("first_put")) | (col("last_use") > col("cleared")))
    conservation = acts.filter(col("first_put").is_null() != col("cleared").is_null())
    scores = facts(made("advantage", "forward", "token_level_rewards"), "key", "sum")
    advantages = facts(made("advantage", "forward", "advantages"), "key", "min_in", "mask_sum")
    score, over = col("sum"), ["global_steps", "uid"]
    advantage = (
        scores.join(advantages.filter(col("mask_sum") > 0), on=where)
        .with_columns(uid.alias("uid"))
        .with_columns(wanted=(score - score.mean().over(over)) / (score.std().over(over) + 1e-6))
        .filter((col("wanted") - col("min_in")).abs() > 1e-4 * (1 + col("min_in").abs()))
    )
    rules = {
        "alignment": alignment,
        "groups": groups,
        "order": order,
        "conservation": conservation,
        "advantage": advantage,
    }
    counted = pl.collect_all([rule.select(pl.len()) for rule in rules.values()])
    return {rule: int(found.item()) for rule, found in zip(rules, counted, strict=True)}
