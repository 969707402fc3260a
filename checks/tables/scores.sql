-- Old log-probs beside the sampler's where the two are of one distribution: the actor's weights of the step, and no token
-- left out (of a validation the sampler may leave out what it likes).
create or replace table sampler_pairs as
with cut_support as (
    select distinct run_id
    from events
    where op = 'generate' and stage = 'rollout' and partition is distinct from 'val' and sampling is not null
        and (sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0 or sampling.repetition_penalty <> 1
            or (sampling.logprobs_mode like 'raw%' and sampling.temperature <> 1))
),
-- those of which the log-probs are of weights that earlier batches of the step had moved; each rank scores its own rows
scored as (
    select run_id, global_steps, k, weights.version <> global_steps - 1 as moved
    from events
    where stage = 'old_log_prob' and op = 'forward' and field = 'log_probs' and weights.version is not null
),
moved as (
    select s.run_id, s.global_steps, l.id
    from scored as s join keyed as l using (k)
    -- none in a run of one batch a step, and then nothing is looked up
    where s.global_steps in (select global_steps from scored where moved)
    group by all
    having bool_and(s.moved)
),
on_policy as (
    select e.rid, e.run_id, e.global_steps, band(e.run_id) as band
    from events as e
    where e.op = 'compare' and e.field = 'old_log_probs' and e.against = 'rollout_log_probs'
        and e.partition is distinct from 'val'
        and not exists (select 1 from cut_support as c where c.run_id is not distinct from e.run_id)
        and coalesce(setting(e.run_id, 'actor_rollout_ref.rollout.top_p'), '1.0') in ('1', '1.0')
        and coalesce(setting(e.run_id, 'actor_rollout_ref.rollout.top_k'), '-1') in ('0', '-1')
),
aged as (
    select c.id
    from key_cells as c join events as e using (rid)
    where c.max_global_steps <> e.global_steps - 1 or c.min_global_steps <> e.global_steps - 1
)
select p.rid, p.id, o.band, p.absdiff_sum, p.n_in, p.absdiff_sum / p.n_in as off
from pair_cells as p join on_policy as o using (rid)
where p.n_in > 0 and p.id not in (select id from aged)
    and not exists (
        select 1 from moved as m
        where m.run_id is not distinct from o.run_id and m.global_steps = o.global_steps and m.id = p.id
    );

-- The optimiser steps of each batch a step trains on, as its mini-batches say it; a step may train on several batches.
create or replace table update_batches as
select run_id, global_steps, update_index,
    max(coalesce(try_cast(attrs['first_update'] as bigint), 0)) as first_update,
    max(coalesce(try_cast(attrs['trajectories'] as double), 1)) as trajectories
from events
where stage = 'update_actor' and op = 'split' and micro_batch is null
group by run_id, global_steps, update_index;

-- Scores that are not what the scorer gave, each with what it gave; ``moved``: the step's are all there, under other keys.
create or replace table changed_scores as
with scored as (
    select rid, step_id, id, stage, "sum" as score from reward_cells
    where field = 'rm_scores' and op = 'score' and isfinite("sum")
),
written as (
    select rid, step_id, id, "sum" as actual from reward_cells
    where field = 'rm_scores' and op = 'produce' and stage in ('rollout', 'reward') and entity = 'trajectory'
        and isfinite("sum")
),
pairs as (
    select w.rid, w.step_id, w.id, w.actual, s.score, 'as the scorer said' as detail
    from written as w join scored as s using (step_id, id)
    union all
    -- an output that was not scored itself carries what its session's last output was given
    select w.rid, w.step_id, w.id, w.actual, s.score, 'as the scorer said of the last output of the session'
    from written as w
    join keys as k using (id)
    join last_outputs as l on l.group_id = k.group_id and l.session_id = k.session_id and l.last > k."index"
    join keys as f on f.group_id = l.group_id and f.session_id = l.session_id and f."index" = l.last
    join scored as s on s.id = f.id and s.step_id = w.step_id
    where w.id not in (select id from reward_cells where op = 'score' and field = 'rm_scores')
    union all
    select s.rid, s.step_id, s.id, s.score, b."sum", 'as the scorer said beside it'
    from scored as s join reward_cells as b using (step_id, id)
    where s.stage = 'reward' and b.stage = 'reward' and b.field = 'score' and b.op = 'produce' and isfinite(b."sum")
),
changed as materialized (
    -- a scorer says float64, the field holds float32
    select * from pairs where abs(actual - score) > 6e-8 * abs(score) + 1e-45
),
steps as (
    select step_id, list_sort(list(printf('%.6g', actual))) = list_sort(list(printf('%.6g', score))) as moved
    from changed
    group by step_id
)
select c.*, s.moved from changed as c join steps as s using (step_id);

-- The groups a step trains on, with the least and the greatest score of their sessions' last outputs: of several sessions.
create or replace table graded as
with finals as (
    select b.step_id, b.group_id, count(*) as sessions, min(b.reward) as low, max(b.reward) as high
    from base as b
    left join last_outputs as l on l.group_id = b.group_id and l.session_id = b.session_id
    where not b.is_padding and isfinite(b.reward) and b."index" = coalesce(l.last, 0)
    group by b.step_id, b.group_id
    having count(*) > 1
),
chosen as (
    select rid, ord, step_id, id from group_cells
    where entity = 'prompt' and stage = 'sample' and op = 'filter' and reason is null and status = 'finished'
        and partition is distinct from 'val'
),
asked as (
    select step_id, id, data_source from group_cells where entity = 'prompt' and stage = 'prompt' and op = 'produce'
)
select c.rid, c.ord, c.step_id, c.id, a.data_source, f.sessions, f.low, f.high
from chosen as c
join keys as k using (id)
join finals as f on f.step_id = c.step_id and f.group_id = k.prompt_id
left join asked as a on a.step_id = c.step_id and a.id = c.id;
