-- code: ADV005
-- name: a group of one has no baseline
-- severity: error
-- says: A real group of one session does not train on its raw reward, unless the trainer's profile does and the group was declared so.
-- needs: key, min_in, max_in
-- fields: advantages
-- examines: select count(*) from (select 1 from grouped join estimators using (step_id) where estimator = 'grpo' and not is_padding and field = 'advantages' and mask_sum > 0 group by step_id, group_id having min(session_id) = max(session_id))
-- subsumed_by: KEY001, KEY002, REW001, VAL001, ADV004
-- source: verl compute_grpo_outcome_advantage takes mean 0 and deviation 1 for a group of one
-- causes: All but one session of the group failed or were filtered, or every row is a group of its own; the estimator then has no baseline and its score, always of one sign, is the advantage.
-- faults: a_lone_session_trains_on_its_reward, the_survivor_of_a_group_meets_the_batch
create or replace temp table lone as
select step_id, group_id, min(rid) as rid, max(id) filter (final) as id, max(reward) filter (final) as reward,
    min(min_in) as low, max(max_in) as high
from grouped join estimators using (step_id)
where estimator = 'grpo' and not is_padding and field = 'advantages'
group by step_id, group_id
having min(session_id) = max(session_id) and (min(min_in) <> 0 or max(max_in) <> 0);
select l.rid, key, 'advantage 0' as expected,
    printf('advantage %.9g', case when abs(l.low) > abs(l.high) then l.low else l.high end) as actual,
    'the only session of its uid, with score ' || coalesce(printf('%.9g', l.reward), 'unknown') as detail,
    case when said('advantage.lone_raw') = 1 and coalesce(d.expected = 1 or d.failed, false) then 'warning' end as severity
from lone as l
join keys using (id)
left join prompt_groups as d on d.step_id = l.step_id and d.group_id = l.group_id
