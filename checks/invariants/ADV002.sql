-- code: ADV002
-- name: advantages are the group's
-- severity: error
-- says: With adv_estimator=grpo an advantage is its session's score less the mean of its uid's sessions, over their unbiased deviation plus epsilon where that is asked for; the score is the sum of the final output's token rewards. What is written is what was computed.
-- needs: key, min_in, max_in
-- fields: advantages
-- examines: select sum(n) from (select count(*) as n from grouped join estimators using (step_id) where grpo and not is_padding and field = 'advantages' and mask_sum > 0 and reward is not null group by step_id, group_id having min(session_id) <> max(session_id))
-- subsumed_by: REW001, REW002, LEN003, VAL001, REW005, ADV006, ADV004, KEY001, KEY002, MSK002
-- source: DeepSeekMath (arXiv:2402.03300); verl compute_grpo_outcome_advantage and compute_advantage_for_multi_trajectories
-- causes: Groups were read as windows of the batch, the scale was the batch's, the deviation the biased one, rows stood for sessions, or advantages were dealt back to other rows than they were computed for.
-- reports: PrimeIntellect-ai/prime-rl#600, THUDM/slime#1414, THUDM/slime#2302, rllm-org/rllm#511, rllm-org/rllm#924
-- faults: a_moving_baseline, a_uuid_for_every_row, any_text_is_true, baseline_weighted_by_length, baseline_without_the_penalty, biased_deviation, each_rank_knows_its_own_rows, epsilon_under_the_root, every_row_its_own_group, groups_of_the_batch_before_balance, groups_read_as_windows, leave_one_out_off_by_one, negative_advantages_are_cut, rows_stand_for_sessions, scale_of_the_batch, scattered_by_uid_alone, scores_in_bfloat16, session_scored_by_its_first_output, the_baseline_leaves_itself_out, the_first_session_is_left_out, the_scale_is_forgotten, uneven_groups_fall_back_to_the_batch, whitened_once_more
-- the row that was last handed to the estimator, of those with one key list
create or replace temp table handed as
select max(rid) as rid from events
where field = 'token_level_rewards' and op = 'forward' and entity = 'trajectory'
group by step_id, k;
create or replace temp table sessions as
select x.step_id, x.group_id, x.session_id, e.by_std, x.mask_sum as final_mask, coalesce(t."sum", x.reward) as score,
    coalesce(t.nnz, 1) as terms
from grouped as x
join estimators as e using (step_id)
left join (
    select id, "sum", nnz from reward_cells
    where rid in (select rid from handed)
) as t using (id)
where e.grpo and x.field = 'advantages' and x.final and not x.is_padding;
create or replace temp table groups as
with scored as (
    select step_id, group_id, count(*) as n, avg(score) as mean, max(abs(score)) as top, max(terms) as terms,
        var_samp(score) filter (isfinite(score)) as variance
    from sessions
    group by step_id, group_id
    having count(*) > 1 and bool_and(coalesce(isfinite(score), false))
),
-- centred: error of score - mean; spread: error of the deviation; both first order, every sum with its terms
bounds as (
    select *, sqrt(variance) as std,
        said('advantage.roundoff') * ((2 * n + 4) * top + terms * (1 + top)) as centred,
        said('advantage.epsilon') as epsilon
    from scored
)
select *, centred * sqrt(n / (n - 1.0)) + (n + 4) * said('advantage.roundoff') * std as spread from bounds;
create or replace temp table wrong as
select x.rid, x.id, x.step_id, x.field, x.group_id, x.session_id, x.min_in, g.n, g.mean, g.std, s.score,
    case
        when said('advantage.final_only') = 1 and s.final_mask = 0 then 0
        when s.by_std then (s.score - g.mean) / (g.std + g.epsilon)
        else s.score - g.mean
    end as advantage
from grouped as x
join sessions as s on s.step_id = x.step_id and s.group_id = x.group_id and s.session_id = x.session_id
join groups as g on g.step_id = x.step_id and g.group_id = x.group_id
where x.mask_sum > 0 and not x.is_padding and abs(x.min_in - advantage) >
    -- the last term: the estimate itself is stored in float32
    case
        when s.by_std then (g.centred + abs(advantage) * g.spread) / greatest(g.epsilon, g.std + g.epsilon - g.spread)
        else g.centred
    end + 2.4e-7 * abs(advantage) + 1e-40;
create or replace temp table rewritten as
select w.rid, f.rid as made_rid
from events as w
join events as f on f.step_id = w.step_id and f.k = w.k and f.field = w.field and f.process = w.process
where w.stage = 'advantage' and w.op = 'produce' and w.field in ('advantages', 'returns') and f.stage = 'advantage'
    and f.op = 'forward' and w.entity = 'trajectory' and w.c <> f.c;
insert into suspects
select rid from rewritten union select made_rid from rewritten;
with torn as (
    -- a session with two values is ADV004's
    select step_id, field, group_id, session_id
    from grouped
    where mask_sum > 0 and (step_id, group_id, session_id) in (select (step_id, group_id, session_id) from wrong)
    group by all
    having min(min_in) <> max(max_in)
)
select rid, key, printf('%.9g', advantage) as expected, printf('%.9g', min_in) as actual,
    printf('score %.9g in a group of %d with mean %.9g and deviation %.9g', score, n, mean, std) as detail,
    null as severity
from wrong as w join keys using (id)
where (w.step_id, w.field, w.group_id, w.session_id) not in (select (step_id, field, group_id, session_id) from torn)
union all
select w.rid, w.key, printf('sum %.9g, fingerprint %x', f.sum_in, f.fingerprint),
    printf('sum %.9g, fingerprint %x', w.sum_in, w.fingerprint), 'as computed, and as written', null
from rewritten as r
join elements as w on w.rid = r.rid
join elements as f on f.rid = r.made_rid and f.key = w.key
where w.fingerprint <> f.fingerprint
