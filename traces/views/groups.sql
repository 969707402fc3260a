-- One row per (run, step, uid): the prompt group, its declared and its real sessions, and its rewards.
create view groups as
with prompts as (
    select
        run_id, global_steps, key as uid,
        max(expected) as expected,
        max_by(status, seq) filter (status is not null) as status,
        any_value(reason) as reason,
        any_value(data_source) as data_source,
        any_value(source_index) filter (op = 'produce') as source_index
    from facts
    where entity = 'prompt' and key is not null
    group by run_id, global_steps, key
),
sessions as (
    select
        run_id, global_steps, uid,
        count(distinct session_id) as sessions,
        count(*) as trajectories,
        avg(reward) as reward_mean,
        stddev_samp(reward) as reward_std,
        bool_and(is_padding) as is_padding
    from trajectories
    where uid is not null
    group by run_id, global_steps, uid
)
select
    coalesce(sessions.run_id, prompts.run_id) as run_id,
    coalesce(sessions.global_steps, prompts.global_steps) as global_steps,
    coalesce(sessions.uid, prompts.uid) as uid,
    coalesce(sessions.sessions, 0) as sessions,
    prompts.expected,
    prompts.status,
    prompts.reason,
    coalesce(sessions.trajectories, 0) as trajectories,
    sessions.reward_mean,
    sessions.reward_std,
    coalesce(sessions.is_padding, false) as is_padding,
    prompts.data_source,
    prompts.source_index
from sessions
full join prompts
    on sessions.run_id is not distinct from prompts.run_id
    and sessions.global_steps = prompts.global_steps
    and sessions.uid = prompts.uid
