"""Hand-written DuckDB SQL over the unnested lists."""

from __future__ import annotations

from pathlib import Path

RULES = {
    "alignment": """
        select count(*) from (
            select global_steps, k from (
                select global_steps, unnest(key) as k, unnest(valid_length) as length from trace
                where entity = 'trajectory' and span = 'response' and layout <> 'scalar' and op <> 'compare'
            ) group by all having min(length) <> max(length)
        )""",
    "groups": """
        with sampled as (
            select global_steps, regexp_replace(k, '_[0-9]+_[0-9]+$', '') as uid, count(*) as sessions from (
                select global_steps, unnest(key) as k from trace
                where stage = 'sample' and op = 'produce' and field = 'key'
            ) group by all
        ),
        declared as (
            select global_steps, unnest(key) as uid, unnest(expected) as sessions from trace
            where stage = 'prompt' and op = 'produce' and field = 'uid'
        )
        select count(*) from declared as d left join sampled as s using (global_steps, uid)
        where coalesce(s.sessions, 0) <> d.sessions""",
    "order": """
        select count(*) from acts
        where first_get < first_put or last_use > cleared""",
    "conservation": """
        select count(*) from acts
        where (first_put is null) <> (cleared is null)""",
    "advantage": """
        with scores as (
            select global_steps, unnest(key) as k, unnest("sum") as score from trace
            where stage = 'advantage' and op = 'forward' and field = 'token_level_rewards'
        ),
        used as (
            select global_steps, unnest(key) as k, unnest(min_in) as advantage, unnest(mask_sum) as tokens from trace
            where stage = 'advantage' and op = 'forward' and field = 'advantages'
        ),
        grouped as (
            select *, avg(score) over uids as mean, stddev_samp(score) over uids as std
            from scores join used using (global_steps, k)
            where tokens > 0
            window uids as (partition by global_steps, regexp_replace(k, '_[0-9]+_[0-9]+$', ''))
        )
        select count(*) from grouped
        where abs((score - mean) / (std + 1e-6) - advantage) > 1e-4 * (1 + abs(advantage))""",
}
ACTS = """
    create temp table acts as
    select partition, k,
        min(seq) filter (op in ('produce', 'tag')) as first_put,
        min(seq) filter (op = 'consume') as first_get,
        max(seq) filter (op <> 'clear') as last_use,
        min(seq) filter (op = 'clear') as cleared
    from (
        select partition, op, seq, unnest(key) as k from trace
        where entity in ('trajectory', 'prompt') and partition is not null
            and (op in ('produce', 'tag', 'clear') or (op = 'consume' and asked_n is not null))
    ) group by all"""


def violations(path: Path, threads: int) -> dict[str, int]:
    import duckdb

    con = duckdb.connect(config={"threads": threads})
    con.execute(f"create view trace as select * from read_parquet('{path}')")
    con.execute(ACTS)
    return {rule: con.execute(sql).fetchall()[0][0] for rule, sql in RULES.items()}
