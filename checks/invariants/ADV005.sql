-- code: ADV005
-- name: a group of one has no baseline
-- severity: error
-- says: A real group of one session does not train on its raw reward, unless the trainer's profile does and the group was declared so.
-- needs: key, min_in, max_in
-- fields: advantages
-- examines: select count(*) from (select 1 from advantage_cells as a join events as e using (rid) join keys as k using (id) join base as b using (id) where not b.is_padding and a.field = 'advantages' and a.mask_sum > 0 and coalesce(setting(e.run_id, 'algorithm.adv_estimator'), case when setting(e.run_id, 'scale_rewards') is not null then 'grpo' end) = 'grpo' group by a.step_id, k.group_id having count(distinct k.session_id) = 1)
-- subsumed_by: KEY001, KEY002, REW001, ADV004
-- source: verl compute_grpo_outcome_advantage takes mean 0 and deviation 1 for a group of one
-- causes: All but one session of the group failed or were filtered, or every row is a group of its own; the estimator then has no baseline and its score, always of one sign, is the advantage.
create or replace temp table lone as
select a.step_id, k.group_id, min(a.rid) as rid, arg_max(a.id, k."index") as id, arg_max(b.reward, k."index") as reward,
    min(a.min_in) as low, max(a.max_in) as high, max(a.mask_sum) as masked
from advantage_cells as a
join events as e using (rid)
join (
    select run_id
    from (
        select run_id, coalesce(
            setting(run_id, 'algorithm.adv_estimator'), case when setting(run_id, 'scale_rewards') is not null then 'grpo' end
        ) as estimator
        from (select distinct run_id from events)
    )
    where estimator = 'grpo'
) as s on s.run_id is not distinct from e.run_id
join keys as k using (id)
join base as b using (id)
where not b.is_padding and k.group_id is not null and a.field = 'advantages' and a.stage = 'advantage'
group by a.step_id, k.group_id
having count(distinct k.session_id) = 1;
with declared as (
    select g.step_id, hash(k.key) as group_id, max(g.expected) = 1 or bool_or(g.status = 'failure' or g.reason is not null) as excused
    from group_cells as g join keys as k using (id)
    where g.entity = 'prompt'
    group by g.step_id, hash(k.key)
)
select l.rid, key, 'advantage 0' as expected, coalesce(printf('advantage %.9g', case when abs(l.low) > abs(l.high) then l.low else l.high end), 'not a number') as actual,
    'the only session of its uid, with score ' || coalesce(printf('%.9g', l.reward), 'unknown') as detail,
    case when said('advantage.lone_raw') = 1 and coalesce(d.excused, false) then 'warning' end as severity
from lone as l
join keys using (id)
left join declared as d on d.step_id = l.step_id and d.group_id = l.group_id
where l.low <> 0 or l.high <> 0 or (l.low is null and l.masked > 0)
