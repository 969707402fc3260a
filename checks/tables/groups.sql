-- The trajectories each step was given to train on, padding rows among them; those it began where no list says so.
create or replace table given as
with handed as (
    select distinct step_id, id from key_cells
    where field = 'key' and partition is distinct from 'val' and ((op = 'produce' and stage = 'sample') or op = 'pad')
)
select h.step_id, id, b.is_padding, b.reward, b.response_len, b.prompt_len, b.num_turns
from handed as h join base as b using (id)
union all
select b.step_id, id, b.is_padding, b.reward, b.response_len, b.prompt_len, b.num_turns
from base as b
where b.step_id not in (select step_id from handed)
    and b.responses_rid not in (select rid from events where partition = 'val');

-- Where to point when a key itself is at fault: where its list was first written, else where it was first seen. (A
-- scorer inside the agent loop sees a key before the queue does, but does not make it.)
create or replace table firsts as
select k, entity, partition, min(late) as late, arg_min(ord, late) as ord, arg_min(rid, late) as rid
from (
    select k, entity, partition, rid, ord, ord + case when op in ('produce', 'tag') then 0 else 1000000000000 end as late
    from events
    where k is not null and entity in ('trajectory', 'prompt')
)
group by k, entity, partition;

-- Sessions of several outputs, with the number of the last one. (The id of a request may look like a key.)
create or replace table last_outputs as
select group_id, session_id, max("index") as last from base where "index" > 0 group by all;

-- Advantages and returns as they were computed, each with its group; ``final``: of the last output of its session.
create or replace table grouped as
select a.rid, a.ord, a.step_id, a.field, a.id, a.mask_sum, a.min_in, a.max_in, b.group_id, b.session_id, b."index",
    b."index" = coalesce(l.last, 0) as final, b.is_padding, b.reward
from advantage_cells as a
join base as b using (id)
left join last_outputs as l on l.group_id = b.group_id and l.session_id = b.session_id
where a.stage = 'advantage' and b.group_id is not null;

-- What a step's estimator is declared to be, where the run says it: ``grpo``, and whether by the group's deviation;
-- ``outcome``: of one score a session.
create or replace table estimators as
select distinct step_id, estimator, norm in ('true', 'group') as by_std,
    estimator = 'grpo' and norm in ('true', 'false', 'group', 'none') and aggregation <> 'normalize_then_sum' as grpo,
    estimator in ('grpo', 'grpo_passk', 'grpo_vectorized', 'rloo', 'rloo_vectorized', 'opo', 'gpg') as outcome
from (
    select run_id, coalesce(estimator, case when scale is not null then 'grpo' end) as estimator,
        coalesce(norm, scale) as norm, coalesce(aggregation, '') as aggregation
    from (
        select run_id, setting(run_id, 'algorithm.adv_estimator') as estimator,
            setting(run_id, 'algorithm.norm_adv_by_std_in_grpo') as norm, setting(run_id, 'scale_rewards') as scale,
            setting(run_id, 'multi_objective_aggregation') as aggregation
        from (select distinct run_id from events)
    )
) as declared
join (select distinct run_id, step_id from events where field = 'advantages' and op = 'forward') as e
    on e.run_id is not distinct from declared.run_id
where estimator is not null;

-- The prompts of each step: how many sessions each declares, whether it ``failed`` or was left out for a reason, and
-- whether it was ``selected`` to train on, with the row that says so.
create or replace table prompt_groups as
select step_id, any_value(k.prompt_id) as group_id, id, max(expected) as expected,
    bool_or(status = 'failure' or reason is not null) as failed,
    bool_or(stage = 'sample' and op = 'filter' and reason is null) as selected,
    max(rid) filter (stage = 'sample' and op = 'filter') as rid
from group_cells join keys as k using (id)
where entity = 'prompt'
group by step_id, id;
