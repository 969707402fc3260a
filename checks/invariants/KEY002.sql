-- code: KEY002
-- name: groups are whole
-- severity: error
-- says: Real keys of a step and partition are unique, a uid has exactly its declared number of sessions unless it failed or a reason is recorded, and the indexes of a session are 0..k-1.
-- needs: key
-- fields:
-- examines: select sum(n) from events where entity = 'trajectory' and ((stage = 'sample' and op = 'produce' and field = 'key') or (stage = 'rollout' and op = 'produce' and field = 'responses'))
-- subsumed_by: KEY001, QUE001, QUE007
-- source: S3
-- causes: A session was lost between the agent loop and the replay buffer, was written twice, or rows were keyed alike.
-- reports: areal-project/AReaL#104, verl-project/verl#148
-- faults: engine_expands_by_another_n, ids_of_a_fixed_number, lost_session
create or replace temp table batch as
with handed as (
    select rid, step_id, stage = 'sample' as sampled, dense_rank() over (order by step_id, partition, stage) as place
    from events
    where entity = 'trajectory' and op = 'produce' and n > 0
        and ((stage = 'sample' and field = 'key') or (stage = 'rollout' and field = 'responses'))
),
places as (
    select *, sampled or step_id not in (select step_id from handed where sampled) as trained from handed
),
candidates as (
    select id, rid, step_id, place, trained from digest_key_cells join places using (rid)
    union all
    select id, rid, step_id, place, trained from digest_content join places on rid = responses_rid
)
select * from candidates;
with doubled as (
    select id, rid, times
    from (select id, max(rid) as rid, count(*) as times from batch group by place, id having count(*) > 1)
    join base using (id)
    where not is_padding
),
groups as materialized (
    select step_id, group_id, min(rid) as rid, min(id) as id, count(*) as sessions, max(last) as last,
        max(outputs) as outputs, bool_or(last + 1 <> outputs) as holes
    from (
        select step_id, group_id, session_id, min(rid) as rid, min(id) as id, max("index") as last,
            count("index") as outputs
        from (
            select c.step_id, b.group_id, b.session_id, b."index", min(c.rid) as rid, min(id) as id
            from batch as c join base as b using (id)
            where c.trained and b.group_id is not null and not b.is_padding
            group by all
        )
        group by all
    )
    group by step_id, group_id
),
declared as (
    select step_id, try_cast(setting(run_id, 'actor_rollout_ref.rollout.n') as bigint) as rollout_n
    from (select distinct step_id, run_id from events)
),
counted as (
    select
        coalesce(g.rid, p.rid) as rid, coalesce(g.id, p.id) as id,
        coalesce(p.expected, s.rollout_n) as declared, coalesce(g.sessions, 0) as sessions,
        coalesce(p.failed, false) as excused
    from groups as g
    full join prompt_groups as p
        on g.step_id = p.step_id and g.group_id = p.group_id
    left join declared as s on s.step_id = coalesce(g.step_id, p.step_id)
    where g.group_id is not null or p.selected
)
select rid, key, 'once in the step' as expected, times || ' times' as actual, null as detail, null as severity
from doubled join keys using (id)
union all
select rid, key, declared || ' sessions', sessions || ' sessions', coalesce('uid ' || uid, 'no session of this uid'), null
from counted join keys using (id)
where declared is not null and sessions <> declared and not excused
union all
select rid, key, 'indexes 0..k-1 in every session', 'a hole: last index ' || last || ', ' || outputs || ' outputs', null, null
from groups join keys using (id)
where holes
