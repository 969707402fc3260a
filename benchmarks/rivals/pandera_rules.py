"""pandera: its schemas hold frames of keys against the rules; pandas makes the frames, as for its users."""

from __future__ import annotations

from pathlib import Path

LISTS = ["key", "valid_length", "expected", "sum", "min_in", "mask_sum"]
SCALARS = ["global_steps", "seq", "stage", "op", "field", "entity", "partition", "span", "layout", "asked_n"]


def violations(path: Path, threads: int) -> dict[str, int]:
    import pandas as pd
    import pandera.pandas as pa

    trace = pd.read_parquet(path, columns=[*SCALARS, *LISTS])
    where = ["global_steps", "key"]

    def facts(chosen: pd.Series, *lists: str) -> pd.DataFrame:
        rows = trace.loc[chosen & (trace["key"].str.len() > 0), ["global_steps", "seq", "op", "partition", *lists]]
        return rows.explode(list(lists), ignore_index=True)

    def made(stage: str, op: str, field: str) -> pd.Series:
        return (trace["stage"] == stage) & (trace["op"] == op) & (trace["field"] == field)

    def uids(keys: pd.Series) -> pd.Series:
        return keys.str.rsplit("_", n=2).str[0]

    def lengths() -> pd.DataFrame:
        spans = (trace["entity"] == "trajectory") & (trace["span"] == "response") & (trace["layout"] != "scalar")
        found = facts(spans & (trace["op"] != "compare"), "key", "valid_length").astype({"valid_length": float})
        return found.groupby(where)["valid_length"].agg(["min", "max"]).reset_index()

    def groups() -> pd.DataFrame:
        sampled = facts(made("sample", "produce", "key"), "key")
        sessions = sampled.assign(key=uids(sampled["key"])).groupby(where).size().rename("sessions")
        return facts(made("prompt", "produce", "uid"), "key", "expected").merge(sessions, on=where, how="left")

    def acts() -> pd.DataFrame:
        used = trace["op"].isin(["produce", "tag", "clear"]) | ((trace["op"] == "consume") & trace["asked_n"].notna())
        keyed = trace["entity"].isin(["trajectory", "prompt"]) & trace["partition"].notna()
        uses, by_key = facts(keyed & used, "key"), ["partition", "key"]
        puts, gets = (uses[uses["op"].isin(o)].groupby(by_key)["seq"].min() for o in (["produce", "tag"], ["consume"]))
        last = uses[uses["op"] != "clear"].groupby(by_key)["seq"].max()
        cleared = uses[uses["op"] == "clear"].groupby(by_key)["seq"].min()
        return pd.concat({"put": puts, "get": gets, "last": last, "cleared": cleared}, axis=1).reset_index()

    def advantages() -> pd.DataFrame:
        scores = facts(made("advantage", "forward", "token_level_rewards"), "key", "sum")
        used = facts(made("advantage", "forward", "advantages"), "key", "min_in", "mask_sum")
        both = scores.merge(used[used["mask_sum"] > 0], on=where).astype({"sum": float, "min_in": float})
        grouped = both.groupby(["global_steps", uids(both["key"])])["sum"]
        return both.assign(wanted=(both["sum"] - grouped.transform("mean")) / (grouped.transform("std") + 1e-6))

    rules = {
        "alignment": (lengths, lambda f: f["min"] == f["max"]),
        "groups": (groups, lambda f: f["sessions"].fillna(0) == f["expected"]),
        "order": (acts, lambda f: ~((f["get"] < f["put"]) | (f["last"] > f["cleared"]))),
        "conservation": (acts, lambda f: f["put"].isna() == f["cleared"].isna()),
        "advantage": (advantages, lambda f: (f["wanted"] - f["min_in"]).abs() <= 1e-4 * (1 + f["min_in"].abs())),
    }
    found = {}
    frames: dict[object, pd.DataFrame] = {}
    for rule, (frame, holds) in rules.items():
        frames[frame] = frames[frame] if frame in frames else frame()
        schema = pa.DataFrameSchema(checks=[pa.Check(holds, name=rule, ignore_na=False)])
        try:
            schema.validate(frames[frame], lazy=True)
            found[rule] = 0
        except pa.errors.SchemaErrors as errors:
            found[rule] = int(errors.failure_cases["index"].nunique())
    return found
