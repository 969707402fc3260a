-- code: ADV002
-- name: advantages are the group's
-- severity: error
-- says: With adv_estimator=grpo an advantage is its session's score less the mean of its uid's sessions, over their unbiased deviation plus epsilon where that is asked for; the score is the sum of the final output's token rewards. What is written is what was computed.
-- needs: key, min_in, max_in
-- fields: advantages
-- examines: select sum(n) from (select count(*) as n from advantage_cells as a join events as e using (rid) join keys as k using (id) join base as b using (id) where not b.is_padding and b.reward is not null and a.field = 'advantages' and a.mask_sum > 0 and coalesce(setting(e.run_id, 'algorithm.adv_estimator'), case when setting(e.run_id, 'scale_rewards') is not null then 'grpo' end) = 'grpo' group by a.step_id, k.group_id having count(distinct k.session_id) > 1)
-- subsumed_by: REW001, REW002, REW005, ADV006, ADV004, KEY001, KEY002, MSK002
-- source: DeepSeekMath (arXiv:2402.03300); verl compute_grpo_outcome_advantage and compute_advantage_for_multi_trajectories
-- causes: Groups were read as windows of the batch, the scale was the batch's, the deviation the biased one, rows stood for sessions, or advantages were dealt back to other rows than they were computed for.
create or replace temp table estimators as
select run_id, norm in ('true', 'group') as by_std
from (
    select run_id, coalesce(setting(run_id, 'algorithm.norm_adv_by_std_in_grpo'), setting(run_id, 'scale_rewards')) as norm,
        coalesce(setting(run_id, 'algorithm.adv_estimator'), 'grpo') as estimator,
        coalesce(setting(run_id, 'multi_objective_aggregation'), '') as aggregation
    from (select distinct run_id from events)
)
where estimator = 'grpo' and norm in ('true', 'false', 'group', 'none') and aggregation <> 'normalize_then_sum';
create or replace temp table estimates as
select a.rid, a.step_id, a.field, a.id, a.mask_sum, a.min_in, a.max_in, s.by_std, k.group_id, k.session_id, k."index",
    b.reward
from advantage_cells as a
join events as e using (rid)
join estimators as s on s.run_id is not distinct from e.run_id
join keys as k using (id)
join base as b using (id)
where not b.is_padding and k.group_id is not null and a.stage = 'advantage';
create or replace temp table group_means as
with token_rewards as (
    select step_id, id, arg_max("sum", ord) as score, arg_max(nnz, ord) as terms
    from reward_cells
    where field = 'token_level_rewards' and op = 'forward' and entity = 'trajectory'
    group by step_id, id
),
sessions as (
    select x.step_id, x.group_id, x.session_id, any_value(x.by_std) as by_std,
        arg_max(coalesce(t.score, x.reward), x."index") as score, arg_max(coalesce(t.terms, 1), x."index") as terms,
        arg_max(x.mask_sum, x."index") as final_mask
    from estimates as x
    left join token_rewards as t on t.step_id = x.step_id and t.id = x.id
    where x.field = 'advantages'
    group by x.step_id, x.group_id, x.session_id
),
means as (
    select step_id, group_id, count(*) as n, avg(score) as mean, max(abs(score)) as top, max(terms) as terms
    from sessions
    group by step_id, group_id
    having bool_and(coalesce(isfinite(score), false)) and count(*) > 1
),
spreads as (
    select s.step_id, s.group_id, sqrt(sum((s.score - m.mean) * (s.score - m.mean)) / (any_value(m.n) - 1)) as std
    from sessions as s join means as m using (step_id, group_id)
    group by s.step_id, s.group_id
),
-- centred: error of score - mean; spread: error of the deviation; both first order, every sum with its terms
bounds as (
    select m.*, d.std,
        said('advantage.roundoff') * ((2 * n + 4) * top + terms * (1 + top)) as centred,
        said('advantage.epsilon') as epsilon
    from means as m join spreads as d using (step_id, group_id)
),
errors as (
    select *, centred * sqrt(n / (n - 1.0)) + (n + 4) * said('advantage.roundoff') * std as spread from bounds
)
select s.step_id, s.group_id, s.session_id, e.n, e.mean, e.std, s.score,
    case
        when said('advantage.final_only') = 1 and s.final_mask = 0 then 0
        when s.by_std then (s.score - e.mean) / (e.std + e.epsilon)
        else s.score - e.mean
    end as advantage,
    -- the last term: the estimate itself is stored in float32
    case
        when s.by_std
            then (e.centred + abs(s.score - e.mean) / (e.std + e.epsilon) * e.spread) / greatest(e.epsilon, e.std + e.epsilon - e.spread)
                + 2.4e-7 * abs(s.score - e.mean) / (e.std + e.epsilon)
        else e.centred + 2.4e-7 * abs(s.score - e.mean)
    end + 1e-40 as tolerance
from sessions as s join errors as e using (step_id, group_id);
create or replace temp table rewritten as
select w.rid, f.rid as made_rid
from events as w
join events as f on f.step_id = w.step_id and f.k = w.k and f.field = w.field and f.process = w.process
where w.stage = 'advantage' and w.op = 'produce' and w.field in ('advantages', 'returns') and f.stage = 'advantage'
    and f.op = 'forward' and w.entity = 'trajectory' and w.c <> f.c;
insert into suspects
select rid from rewritten union select made_rid from rewritten;
with single as (
    -- a session with two values is ADV004's
    select step_id, field, group_id, session_id
    from estimates
    where mask_sum > 0
    group by all
    having min(min_in) is not distinct from max(max_in)
)
select x.rid, key, printf('%.9g', g.advantage) as expected, coalesce(printf('%.9g', x.min_in), 'not a number') as actual,
    printf('score %.9g in a group of %d with mean %.9g and deviation %.9g', g.score, g.n, g.mean, g.std) as detail,
    null as severity
from estimates as x
join group_means as g on g.step_id = x.step_id and g.group_id = x.group_id and g.session_id = x.session_id
join single as u
    on u.step_id = x.step_id and u.field = x.field and u.group_id = x.group_id and u.session_id = x.session_id
join keys using (id)
where x.mask_sum > 0 and (x.min_in is null or not isfinite(x.min_in) or abs(x.min_in - g.advantage) > g.tolerance)
union all
select w.rid, w.key, printf('sum %.9g, fingerprint %x', f.sum_in, f.fingerprint),
    printf('sum %.9g, fingerprint %x', w.sum_in, w.fingerprint), 'as computed, and as written', null
from rewritten as r
join elements as w on w.rid = r.rid
join elements as f on f.rid = r.made_rid and f.key = w.key
where w.fingerprint <> f.fingerprint
