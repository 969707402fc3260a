-- One row per (run, step): how much was recorded, what was trained on, how the update went.
create view steps as
with recorded as (
    select
        run_id, global_steps,
        count(*) as "rows",
        sum(n) as facts,
        avg(optim.grad_norm) filter (op = 'optim_step') as grad_norm,
        sum(loss.scale * loss.numerator / nullif(loss.denominator, 0)) filter (field = 'loss') as loss,
        make_timestamp_ns(min(time_ns)) as began,
        (max(time_ns) - min(time_ns)) / 1e9 as seconds
    from "rows"
    group by run_id, global_steps
),
trained as (
    select
        run_id, global_steps,
        count(*) as trajectories,
        count(*) filter (not is_padding) as real_trajectories,
        sum(policy_len) filter (not is_padding) as policy_tokens,
        avg(policy_len) filter (not is_padding) as policy_len_mean,
        avg(reward) filter (not is_padding) as reward_mean
    from trajectories
    where partition is distinct from 'val'
    group by run_id, global_steps
)
select
    recorded.run_id, recorded.global_steps, recorded."rows", recorded.facts,
    coalesce(trained.trajectories, 0) as trajectories,
    coalesce(trained.real_trajectories, 0) as real_trajectories,
    trained.policy_tokens, trained.policy_len_mean, trained.reward_mean,
    recorded.loss, recorded.grad_norm, recorded.began, recorded.seconds
from recorded
left join trained
    on recorded.run_id is not distinct from trained.run_id and recorded.global_steps = trained.global_steps
order by recorded.run_id, recorded.global_steps
