-- One row per (run, step, partition, trajectory key): what the step's events say of it, put together. Keys are parsed
-- last, once each, and from an aggregate, so that no filter on uid makes DuckDB parse the key of every fact.
create view trajectories as
with said as (
    select run_id, global_steps, key,
        any_value(key) as name,
        any_value(partition) as partition,
        coalesce(bool_or(is_padding), false) as is_padding,
        coalesce(
            cast(min_by("sum", seq) filter (field = 'prompt_len' and "sum" is not null) as bigint),
            min_by(valid_length, seq) filter (field = 'prompts')
        ) as prompt_len,
        coalesce(
            cast(min_by("sum", seq) filter (field = 'response_len' and "sum" is not null) as bigint),
            min_by(valid_length, seq) filter (field = 'responses')
        ) as response_len,
        coalesce(
            cast(min_by("sum", seq) filter (field = 'seq_len' and "sum" is not null) as bigint),
            min_by(valid_length, seq) filter (field = 'input_ids')
        ) as seq_len,
        min_by(mask_sum, seq) filter (field = 'response_mask') as policy_len,
        min_by("sum", seq) filter (field = 'rm_scores') as reward,
        min_by(sum_in, seq) filter (field = 'rollout_log_probs') as rollout_log_probs_sum,
        min_by(sum_in, seq) filter (field = 'old_log_probs') as old_log_probs_sum,
        min_by(sum_in, seq) filter (field = 'ref_log_prob') as ref_log_prob_sum,
        max_by(max_in, seq) filter (field = 'advantages') as advantage,
        max(min_global_steps) as min_global_steps,
        max(max_global_steps) as max_global_steps,
        any_value(finish_reason) as finish_reason,
        coalesce(any_value(num_turns), cast(any_value("sum") filter (field = 'num_turns') as integer)) as num_turns,
        any_value(data_source) as data_source,
        sum(generated) filter (op = 'produce' and field = 'responses') as generated
    from facts
    where entity = 'trajectory' and key is not null
    group by run_id, global_steps, key
),
parsed as (
    select *, regexp_extract(name, '^(.+)_(0|[1-9][0-9]*)_(0|[1-9][0-9]*)$', ['uid', 'session_id', 'index']) as part
    from said
)
select
    run_id,
    global_steps,
    partition,
    key,
    nullif(part.uid, '') as uid,
    try_cast(part.session_id as integer) as session_id,
    try_cast(part."index" as integer) as "index",
    * exclude (run_id, global_steps, partition, key, name, part)
from parsed
