-- code: QUE008
-- name: no prompt waits for ever
-- severity: warning
-- says: No prompt stays pending or running past its age: the next step of a synchronous run, as many steps as the staleness limit allows of another.
-- needs: status
-- fields:
-- looks: run
-- examines: select count(*) from group_cells where entity = 'prompt' and status in ('pending', 'running')
-- subsumed_by: QUE002
-- source: verl tags a prompt pending when it is submitted; nobody looks at it again unless it ends
-- backs_up: QUE002: that one says at the end of the step what is still there, this one since when a prompt waits, in runs where prompts may outlive a step
-- causes: The worker that was given the prompt died, or an eviction cleared its outputs and left its key.
-- faults: worker_died_with_its_prompt
create or replace temp table waits as
with seen as (
    select c.id, e.run_id, e.global_steps, e.ord, c.i, c.rid, c.status
    from group_cells as c join events as e using (rid)
    where c.entity = 'prompt' and c.status is not null and e.partition is distinct from 'val'
    union all
    select k.id, e.run_id, e.global_steps, e.ord, 0, e.rid, 'cleared'
    from events as e join keyed as k using (k)
    where e.op = 'clear' and e.entity = 'prompt' and e.n > 0
)
select id, run_id, max_by(status, (ord, i)) as status, max_by(rid, (ord, i)) as rid,
    max_by(global_steps, (ord, i)) as since
from seen
group by id, run_id;
with ends as (
    select run_id, max(global_steps) as last,
        case
            when synchronous(run_id) then 0
            else coalesce(try_cast(setting(run_id, 'trainer.v1.sampler.max_off_policy_threshold') as bigint), 8)
        end as age
    from events group by run_id
)
select w.rid, k.key, 'an end by step ' || (w.since + e.age) as expected, w.status || ' in step ' || e.last as actual,
    'waits since step ' || w.since as detail, null as severity
from waits as w join ends as e on e.run_id is not distinct from w.run_id join keys as k using (id)
where w.status in ('pending', 'running') and e.last - w.since > e.age
