-- code: QUE002
-- name: everything created is cleared
-- severity: error
-- says: The keys cleared over a step are the keys created in it, prompts and trajectories, and nothing is resident after the step's clear.
-- needs: key
-- fields:
-- examines: select sum(n) from events where k is not null and ((op = 'tag' and queue) or (op = 'produce' and queue) or op = 'clear')
-- subsumed_by: QUE001, KEY002
-- source: S11
-- causes: The clear used the keys of the batch before padding or merging, so that the rest of the partition grows step by step.
create or replace temp table owned as
select e.run_id, coalesce(e.partition, '') as partition, k.id,
    min(e.global_steps) filter (e.op <> 'clear') as created,
    arg_min(e.rid, e.ord) filter (e.op <> 'clear') as created_rid,
    max(e.global_steps) filter (e.op = 'clear') as cleared,
    arg_min(e.rid, e.ord) filter (e.op = 'clear') as cleared_rid
from (
    select run_id, partition, global_steps, k, op, min(ord) as ord, arg_min(rid, ord) as rid
    from events
    where k is not null and n > 0 and (op in ('tag', 'clear') or (queue and op = 'produce'))
    group by all
) as e
join keyed as k using (k)
group by all;
with ends as (
    select run_id, global_steps, arg_max(rid, ord) as rid, max_by(resident, ord) as resident
    from events
    where op = 'clear' and stage = 'clear'
    group by all
)
select coalesce(e.rid, o.created_rid) as rid, k.key, 'cleared in step ' || o.created as expected,
    case when o.cleared is null then 'never cleared' else 'cleared in step ' || o.cleared end as actual,
    'created in step ' || o.created as detail, null as severity
from owned as o
join keys as k using (id)
left join ends as e on e.run_id is not distinct from o.run_id and e.global_steps = o.created
where o.created is not null and (o.cleared is null or o.cleared > o.created)
union all
select o.cleared_rid, k.key, 'a key that was created', 'cleared, but nobody created it', null, null
from owned as o join keys as k using (id)
where o.created is null
    and exists (select 1 from owned as other where other.created is not null and other.partition = o.partition)
union all
select rid, null, 'nothing resident',
    printf('%d prompts, %d trajectories', coalesce(resident.prompts, 0), coalesce(resident.trajectories, 0)),
    'after the clear of the step', null
from ends
where coalesce(resident.prompts, 0) > 0 or coalesce(resident.trajectories, 0) > 0
