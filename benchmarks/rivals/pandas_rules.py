"""pandas over the exploded lists."""

from __future__ import annotations

from pathlib import Path

LISTS = ["key", "valid_length", "expected", "sum", "min_in", "mask_sum"]
SCALARS = ["global_steps", "seq", "stage", "op", "field", "entity", "partition", "span", "layout", "asked_n"]


def violations(path: Path, threads: int) -> dict[str, int]:
    import pandas as pd

    trace = pd.read_parquet(path, columns=[*SCALARS, *LISTS])
    where = ["global_steps", "key"]

    def facts(chosen: pd.Series, *lists: str) -> pd.DataFrame:
        rows = trace.loc[chosen & (trace["key"].str.len() > 0), ["global_steps", "seq", "op", "partition", *lists]]
        return rows.explode(list(lists), ignore_index=True)

    def made(stage: str, op: str, field: str) -> pd.Series:
        return (trace["stage"] == stage) & (trace["op"] == op) & (trace["field"] == field)

    def uids(keys: pd.Series) -> pd.Series:
        return keys.str.rsplit("_", n=2).str[0]

    spans = (trace["entity"] == "trajectory") & (trace["span"] == "response") & (trace["layout"] != "scalar")
    lengths = facts(spans & (trace["op"] != "compare"), "key", "valid_length")
    known = lengths.astype({"valid_length": "float"}).groupby(where)["valid_length"].agg(["min", "max"])
    sampled = facts(made("sample", "produce", "key"), "key")
    sessions = sampled.assign(key=uids(sampled["key"])).groupby(where).size().rename("sessions")
    declared = facts(made("prompt", "produce", "uid"), "key", "expected").merge(sessions, on=where, how="left")
    used = trace["op"].isin(["produce", "tag", "clear"]) | ((trace["op"] == "consume") & trace["asked_n"].notna())
    keyed = trace["entity"].isin(["trajectory", "prompt"]) & trace["partition"].notna()
    uses = facts(keyed & used, "key")
    by_key = ["partition", "key"]
    puts, gets = (uses[uses["op"].isin(ops)].groupby(by_key)["seq"].min() for ops in (["produce", "tag"], ["consume"]))
    last = uses[uses["op"] != "clear"].groupby(by_key)["seq"].max()
    cleared = uses[uses["op"] == "clear"].groupby(by_key)["seq"].min()
    acts = pd.concat({"put": puts, "get": gets, "last": last, "cleared": cleared}, axis=1)
    scores = facts(made("advantage", "forward", "token_level_rewards"), "key", "sum")
    advantages = facts(made("advantage", "forward", "advantages"), "key", "min_in", "mask_sum")
    both = scores.merge(advantages[advantages["mask_sum"] > 0], on=where).astype({"sum": float, "min_in": float})
    grouped = both.groupby(["global_steps", uids(both["key"])])["sum"]
    wanted = (both["sum"] - grouped.transform("mean")) / (grouped.transform("std") + 1e-6)
    return {
        "alignment": int((known["min"] != known["max"]).sum()),
        "groups": int((declared["sessions"].fillna(0) != declared["expected"]).sum()),
        "order": int(((acts["get"] < acts["put"]) | (acts["last"] > acts["cleared"])).sum()),
        "conservation": int((acts["put"].isna() != acts["cleared"].isna()).sum()),
        "advantage": int(((wanted - both["min_in"]).abs() > 1e-4 * (1 + both["min_in"].abs())).sum()),
    }
