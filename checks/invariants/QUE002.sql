-- code: QUE002
-- name: everything created is cleared
-- severity: error
-- says: The keys cleared over a step are the keys created in it, prompts and trajectories, and nothing is resident after the step's clear (of an asynchronous run, where groups outlive a step: what was sampled in it).
-- needs: key
-- fields:
-- examines: select sum(n) from events where k is not null and ((op = 'tag' and queue) or (op = 'produce' and queue) or op = 'clear')
-- subsumed_by: QUE001, KEY002, KEY003, KEY005
-- source: S11
-- causes: The clear used the keys of the batch before padding or merging, so that the rest of the partition grows step by step.
-- reports: Ascend/TransferQueue#129, areal-project/AReaL#1209, areal-project/AReaL#1296
-- faults: consumer_keeps_what_it_fetched, every_rank_keeps_its_results, padding_is_never_cleared, prompt_keys_are_never_cleared, prompt_nobody_runs
create or replace temp table owned as
select e.scope, k.id, min(created) as created, min(created_ord) as created_ord, max(cleared) as cleared,
    min(cleared_ord) as cleared_ord
from (
    select scope, k,
        min(global_steps) filter (op <> 'clear') as created,
        min(ord) filter (op <> 'clear') as created_ord,
        max(global_steps) filter (op = 'clear') as cleared,
        min(ord) filter (op = 'clear') as cleared_ord
    from events
    where k is not null and n > 0 and (op in ('tag', 'clear') or (queue and op = 'produce'))
    group by scope, k
) as e
join keyed as k using (k)
group by e.scope, k.id;
with ends as (
    select run_id, global_steps, arg_max(rid, ord) as rid, max_by(resident, ord) as resident
    from events
    where op = 'clear' and stage = 'clear'
    group by all
)
select coalesce(e.rid, c.rid) as rid, k.key, 'cleared in step ' || o.created as expected,
    case when o.cleared is null then 'never cleared' else 'cleared in step ' || o.cleared end as actual,
    'created in step ' || o.created as detail, null as severity
from owned as o
join keys as k using (id)
join events as c on c.ord = o.created_ord
left join ends as e on e.run_id is not distinct from c.run_id and e.global_steps = o.created
where o.created is not null and (o.cleared is null or o.cleared > o.created)
    and synchronous(c.run_id)
union all
select s.rid, k.key, 'cleared in step ' || s.global_steps,
    case when o.cleared is null then 'never cleared' else 'cleared in step ' || o.cleared end,
    'sampled in step ' || s.global_steps, null
from (
    select rid, k, scope, run_id, global_steps from events
    where stage = 'sample' and op = 'produce' and field = 'key' and entity = 'trajectory' and n > 0
        and not synchronous(run_id)
) as s
join keyed as m on m.k = s.k
join owned as o on o.id = m.id and o.scope = s.scope
join keys as k on k.id = m.id
where o.cleared is null or o.cleared > s.global_steps
union all
select c.rid, k.key, 'a key that was created', 'cleared, but nobody created it', null, null
from owned as o join keys as k using (id) join events as c on c.ord = o.cleared_ord
where o.created is null
    and c.scope in (
        select scope from events
        where k is not null and n > 0 and (op = 'tag' or (queue and op = 'produce'))
    )
union all
select rid, null, 'nothing resident',
    printf('%d prompts, %d trajectories', coalesce(resident.prompts, 0), coalesce(resident.trajectories, 0)),
    'after the clear of the step', null
from ends
where (coalesce(resident.prompts, 0) > 0 or coalesce(resident.trajectories, 0) > 0)
    and synchronous(run_id)
