-- code: VAL003
-- name: validation stays out of training
-- severity: error
-- says: No row of a validation prompt is sampled into a training batch, scored for it, trained on, or counted in a training metric.
-- needs: key, partition
-- fields:
-- examines: select sum(n) from events where entity in ('trajectory', 'prompt') and partition = 'val'
-- subsumed_by: KEY001
-- source: verl keeps validation in a partition of its own
-- causes: Validation and training share a queue partition, a buffer or a running statistic, and what was meant to measure the policy trains it.
-- faults: validation_in_the_running_mean
create or replace temp table validated as
select distinct k.id
from events as e join keyed as k using (k)
where e.partition = 'val' and e.entity = 'trajectory';
create or replace temp table asked_groups as
select distinct n.prompt_id as group_id
from events as e join keyed as k using (k) join keys as n using (id)
where e.partition = 'val' and e.entity = 'prompt';
create or replace temp table training as
select run_id, k, min(rid) as rid, min(ord) as ord
from events
where entity = 'trajectory' and n > 0 and k is not null
    and (
        stage in ('balance', 'old_log_prob', 'ref_log_prob', 'values', 'advantage', 'update_actor', 'metrics')
        or (stage = 'sample' and partition is distinct from 'val')
    )
    and exists (select 1 from events as v where v.partition = 'val' and v.run_id is not distinct from events.run_id)
group by run_id, k;
select min_by(t.rid, t.ord) as rid, n.key, 'a training prompt' as expected, 'a prompt of the validation' as actual,
    'uid ' || n.uid as detail, null as severity
from training as t join keyed as k using (k) join keys as n using (id)
where k.id in (select id from validated) or n.group_id in (select group_id from asked_groups)
group by k.id, n.key, n.uid
