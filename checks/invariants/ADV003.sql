-- code: ADV003
-- name: a group's advantages balance
-- severity: error
-- says: Over the sessions of a whole group the advantages have mean 0 within 1e-3 (1 + max|adv|); with the group's scale none exceeds (n-1)/sqrt(n); equal scores give 0 but for float residue.
-- needs: key, min_in, max_in
-- fields: advantages
-- examines: select sum(n) from (select count(distinct k.session_id) as n from advantage_cells as a join events as e using (rid) join keys as k using (id) join base as b using (id) where not b.is_padding and a.field = 'advantages' and a.mask_sum > 0 and coalesce(setting(e.run_id, 'algorithm.adv_estimator'), case when setting(e.run_id, 'scale_rewards') is not null then 'grpo' end) = 'grpo' group by a.step_id, k.group_id having count(distinct k.session_id) > 1)
-- subsumed_by: ADV002, ADV004, ADV006, REW001, REW002, KEY001, KEY002
-- backs_up: ADV002: it needs no score, so it holds where the rewards an estimator was given are not traced.
-- source: DeepSeekMath (arXiv:2402.03300): what follows from the estimator whatever the scores are
-- causes: The baseline is not the group's own: the mean of the batch, of a window, of other rows; or the scale is not the group's.
create or replace temp table balanced as
with estimators as (
    select run_id, norm in ('true', 'group') as by_std
    from (
        select run_id, coalesce(setting(run_id, 'algorithm.norm_adv_by_std_in_grpo'), setting(run_id, 'scale_rewards')) as norm,
            coalesce(setting(run_id, 'algorithm.adv_estimator'), 'grpo') as estimator,
            coalesce(setting(run_id, 'multi_objective_aggregation'), '') as aggregation
        from (select distinct run_id from events)
    )
    where estimator = 'grpo' and norm in ('true', 'false', 'group', 'none') and aggregation <> 'normalize_then_sum'
),
sessions as (
    select a.step_id, a.field, k.group_id, k.session_id, any_value(s.by_std) as by_std,
        min(a.rid) as rid, arg_max(a.id, k."index") as id, max(a.max_in) as advantage, arg_max(b.reward, k."index") as reward,
        arg_max(a.mask_sum, k."index") as final_mask
    from advantage_cells as a
    join events as e using (rid)
    join estimators as s on s.run_id is not distinct from e.run_id
    join keys as k using (id)
    join base as b using (id)
    where not b.is_padding and k.group_id is not null and a.stage = 'advantage'
    group by all
),
declared as (
    select g.step_id, hash(k.key) as group_id, max(g.expected) as expected
    from group_cells as g join keys as k using (id)
    where g.entity = 'prompt' and g.expected is not null
    group by g.step_id, hash(k.key)
),
groups as (
    select s.step_id, s.field, s.group_id, any_value(s.by_std) as by_std, count(*) as n, min(s.rid) as rid, min(s.id) as id,
        avg(s.advantage) as mean, max(abs(s.advantage)) as largest, arg_max(s.id, abs(s.advantage)) as largest_id,
        max(s.reward) - min(s.reward) as spread, max(abs(s.reward)) as top
    from sessions as s
    left join declared as d on d.step_id = s.step_id and d.group_id = s.group_id
    group by s.step_id, s.field, s.group_id
    -- whole groups, every session of which shows its advantage
    having count(*) > 1 and count(*) >= coalesce(max(d.expected), 2) and count(s.advantage) = count(*)
        and bool_and(s.final_mask > 0) and bool_and(coalesce(isfinite(s.advantage), false))
)
select * from groups;
select rid, key, 'mean 0' as expected, printf('mean %.6g', mean) as actual,
    printf('of the advantages of %d sessions of one uid, the greatest %.6g', n, largest) as detail, null as severity
from balanced join keys using (id)
where abs(mean) > 1e-3 * (1 + largest)
union all
select rid, key, printf('at most %.6g', (n - 1) / sqrt(n)), printf('%.6g', largest),
    'no session of ' || n || ' can be further from their mean', null
from balanced join keys on keys.id = largest_id
where by_std and largest > (n - 1) / sqrt(n) + 1e-3
union all
select b.rid, key, 'advantage 0', printf('advantage %.6g', largest), n || ' sessions with one score',
    case when largest * case when by_std then said('advantage.epsilon') else 1 end > 16 * pow(2, -24) * top then null else 'warning' end
from balanced as b join keys on keys.id = largest_id
-- with a KL in the reward equal scores are no equal rewards
join (
    select distinct step_id, coalesce(setting(run_id, 'algorithm.use_kl_in_reward'), 'false') as kl
    from (select distinct step_id, run_id from events)
) as q using (step_id)
where q.kl = 'false' and spread = 0
    and (largest * case when by_std then said('advantage.epsilon') else 1 end > 16 * pow(2, -24) * top or largest > 1e-2)
