-- code: ADV003
-- name: a group's advantages balance
-- severity: error
-- says: Over the sessions of a whole group the advantages have mean 0 within 1e-3 (1 + max|adv|); with the group's scale none exceeds (n-1)/sqrt(n); equal scores give 0 but for float residue.
-- needs: key, min_in, max_in
-- fields: advantages
-- examines: select sum(n) from (select count(*) as n from grouped join estimators using (step_id) where grpo and not is_padding and field = 'advantages' and mask_sum > 0  group by step_id, group_id having min(session_id) <> max(session_id))
-- subsumed_by: ADV002, ADV004, ADV006, REW001, VAL001, REW002, KEY001, KEY002
-- backs_up: ADV002: it needs no score, so it holds where the rewards an estimator was given are not traced.
-- source: DeepSeekMath (arXiv:2402.03300): what follows from the estimator whatever the scores are
-- causes: The baseline is not the group's own: the mean of the batch, of a window, of other rows; or the scale is not the group's.
-- faults: a_loop_that_traces_no_rewards
create or replace temp table balances as
-- whole groups, every session of which shows its advantage; two in one row are ADV004's
select step_id, field, group_id, any_value(e.by_std) as by_std, count(*) as n, min(rid) as rid, min(id) as id,
    avg(max_in) as mean, max(abs(max_in)) as largest, max(reward) - min(reward) as spread, max(abs(reward)) as top
from grouped join estimators as e using (step_id)
where e.grpo and final and not is_padding
group by step_id, field, group_id
having count(*) > 1 and min(mask_sum) > 0 and count(max_in) = count(*) and bool_and(min_in = max_in)
    and isfinite(sum(abs(max_in)));
create or replace temp table unbalanced as
with doubtful as (
    select * from balances
    where abs(mean) > 1e-3 * (1 + largest) or (by_std and largest > (n - 1) / sqrt(n) + 1e-3)
        -- what float residue over epsilon makes of equal scores is a warning
        or (spread = 0 and (largest > 1e-2 or largest * case when by_std then said('advantage.epsilon') else 1 end > 16 * pow(2, -24) * top))
)
select d.*
from doubtful as d left join prompt_groups as w using (step_id, group_id)
where d.n >= coalesce(w.expected, 2);
select rid, key, 'mean 0' as expected, printf('mean %.6g', mean) as actual,
    printf('of the advantages of %d sessions of one uid, the greatest %.6g', n, largest) as detail, null as severity
from unbalanced join keys using (id)
where abs(mean) > 1e-3 * (1 + largest)
union all
select rid, key, printf('at most %.6g', (n - 1) / sqrt(n)), printf('%.6g', largest),
    'no session of ' || n || ' can be further from their mean', null
from unbalanced join keys using (id)
where by_std and largest > (n - 1) / sqrt(n) + 1e-3
union all
select b.rid, key, 'advantage 0', printf('advantage %.6g', largest), n || ' sessions with one score',
    case when largest * case when by_std then said('advantage.epsilon') else 1 end <= 16 * pow(2, -24) * top then 'warning' end
from unbalanced as b join keys using (id)
-- with a KL in the reward equal scores are no equal rewards
join (
    select step_id, coalesce(setting(run_id, 'algorithm.use_kl_in_reward'), 'false') as kl
    from (select distinct step_id, run_id from events)
) as q using (step_id)
where q.kl = 'false' and spread = 0 and largest > 0
