-- code: REW005
-- name: rewards are scores, less a KL under the mask
-- severity: error
-- says: With algorithm.use_kl_in_reward=false token_level_rewards are token_level_scores; with true they are less the coefficient times a KL that the log-probs have, under the mask only. A fixed coefficient is algorithm.kl_ctrl.kl_coef; an adaptive one begins there and moves after each batch by (KL / target_kl - 1, a fifth at most) x trajectories / horizon.
-- needs: key, fingerprint, nnz_out
-- fields: token_level_scores, token_level_rewards
-- examines: select sum(n) from events where field = 'token_level_rewards' and op = 'forward' and entity = 'trajectory' and setting(run_id, 'algorithm.use_kl_in_reward') is not null
-- subsumed_by: REW001, REW002, VAL001
-- source: verl's fit: apply_kl_penalty, or token_level_rewards = token_level_scores; the adaptive controller of arXiv:1909.08593
-- causes: A penalty was taken off although the run has none, the KL was not masked, or the rewards were shaped in place and the scores with them; the controller was never told the KL, told another one, or made anew.
-- reports: THUDM/slime#1372
-- faults: a_controller_for_each_batch, a_penalty_the_run_has_not, penalty_is_added, the_coefficient_moves_the_wrong_way, the_coefficient_never_moves, the_coefficient_of_another_run, the_controller_is_told_a_sum, the_horizon_counts_padding, the_penalty_is_not_masked
create or replace temp table rewarded as
select r.rid, s.rid as scores_rid, q.kl, r.c, s.c as scores_c, r.outside, s.outside as scores_outside,
    -- where a rejection took tokens out since, what the KL left there is REW007's
    r.m is not distinct from x.mask_m as whole
from events as r
left join expected as x on x.k = r.k
join (
    select run_id, setting(run_id, 'algorithm.use_kl_in_reward') as kl
    from (select distinct run_id from events)
) as q on q.run_id is not distinct from r.run_id
join events as s
    on s.step_id = r.step_id and s.k = r.k and s.stage = r.stage and s.op = r.op and s.process = r.process
where r.field = 'token_level_rewards' and s.field = 'token_level_scores' and r.op = 'forward'
    and r.entity = 'trajectory';
create or replace temp table unlike_scores as
select rid, scores_rid, kl
from rewarded
where (kl = 'false' and c is distinct from scores_c) or (kl = 'true' and whole and outside is distinct from scores_outside);
create or replace temp table penalties as
-- k1 is told by the sums of the two log-probs; of the others the distance between them leaves bounds
with paid as (
    select s.step_id, s.id, arg_max(s."sum", s.ord) filter (s.field = 'token_level_scores')
            - arg_max(s."sum", s.ord) filter (s.field = 'token_level_rewards') as taken,
        max(s.rid) filter (s.field = 'token_level_rewards') as rid
    from reward_cells as s join events as e using (rid)
    where s.op = 'forward' and setting(e.run_id, 'algorithm.use_kl_in_reward') = 'true'
    group by s.step_id, s.id
),
coefficients as (
    select c.step_id, any_value(c."sum") as coef
    from group_cells as c join keys using (id)
    where c.field = 'metrics' and keys.key = 'actor/reward_kl_penalty_coeff'
    group by c.step_id
)
select paid.rid, paid.id, paid.taken, c.coef, p.n_in, p.absdiff_sum as d, p.absdiff_max as m,
    rtrim(setting(e.run_id, 'algorithm.kl_penalty'), '+') as kind, o.sum_in - r.sum_in as k1,
    abs(o.sum_in) + abs(r.sum_in) as size
from paid
join events as e on e.rid = paid.rid
join coefficients as c on c.step_id = paid.step_id
join pair_cells as p on p.step_id = paid.step_id and p.id = paid.id and p.field = 'ref_log_prob' and p.n_in > 0
join token_sum_cells as o on o.step_id = paid.step_id and o.id = paid.id and o.field = 'old_log_probs'
join token_sum_cells as r on r.step_id = paid.step_id and r.id = paid.id and r.field = 'ref_log_prob'
where o.mask_sum = p.n_in and r.mask_sum = p.n_in;
create or replace temp table coefficient_moves as
with said as (
    select rid, run_id, global_steps, ord, try_cast(attrs['kl_coef'] as double) as coef, try_cast(attrs['kl'] as double) as kl,
        try_cast(attrs['kl_coef_next'] as double) as then_coef
    from events
    where field = 'token_level_rewards' and op = 'forward' and entity = 'trajectory' and attrs['kl_coef'] is not null
),
counted as (
    select c.rid, count(*) filter (b.mask_sum > 0) as trajectories
    from reward_cells as c join base as b using (id)
    where c.rid in (select rid from said)
    group by c.rid
)
select s.*, c.trajectories,
    lag(then_coef) over batches as left_at,
    lag(global_steps) over batches as left_in,
    setting(run_id, 'algorithm.kl_ctrl.type') as kind,
    try_cast(setting(run_id, 'algorithm.kl_ctrl.kl_coef') as double) as first_coef,
    coef * (1 + greatest(least(kl / try_cast(setting(run_id, 'algorithm.kl_ctrl.target_kl') as double) - 1, 0.2), -0.2)
        * c.trajectories / try_cast(setting(run_id, 'algorithm.kl_ctrl.horizon') as double)) as moved
from said as s left join counted as c using (rid)
window batches as (partition by run_id order by ord);
insert into suspects
select rid from unlike_scores union select scores_rid from unlike_scores;
select r.rid, r.key,
    case when u.kl = 'true' then printf('%d tokens outside the mask with a reward', s.nnz_out)
        else printf('sum %.9g, fingerprint %x', s."sum", s.fingerprint) end as expected,
    case when u.kl = 'true' then printf('%d tokens', r.nnz_out)
        else printf('sum %.9g, fingerprint %x', r."sum", r.fingerprint) end as actual,
    case when u.kl = 'true' then 'as the scores have' else 'the scores, and the rewards; algorithm.use_kl_in_reward=false' end as detail,
    null as severity
from unlike_scores as u
join elements as r on r.rid = u.rid
join elements as s on s.rid = u.scores_rid and s.key = r.key
where (u.kl = 'false' and r.fingerprint <> s.fingerprint) or (u.kl = 'true' and r.nnz_out <> s.nnz_out)
union all
-- a coefficient that adapts moves by a fifth at most between two batches of a step
select rid, keys.key, printf('from %.6g to %.6g taken off', least(0.75 * low, 1.25 * low), greatest(0.75 * high, 1.25 * high)),
    printf('%.6g', taken), printf('KL by %s, coefficient %g, log-probs %.6g apart over %d tokens', kind, coef, d, n_in), null
from (
    select *,
        coef * case when kind in ('kl', 'k1') then k1 else kl_least(kind, d, m, n_in) end as low,
        coef * case when kind in ('kl', 'k1') then k1 else kl_most(kind, d, m) end as high
    from penalties where kind in ('kl', 'k1', 'abs', 'mse', 'k2', 'low_var_kl', 'k3')
) join keys using (id)
where taken < least(0.75 * low, 1.25 * low) - 1e-4 * coef * size - 1e-6
    or taken > greatest(0.75 * high, 1.25 * high) + 1e-4 * coef * size + 1e-6
union all
select rid, null, printf('coefficient %.9g', wanted), printf('coefficient %.9g', coef), why, null
from (
    select *, case when kind = 'fixed' or left_at is null then first_coef else left_at end as wanted,
        case when kind = 'fixed' or left_at is null then 'algorithm.kl_ctrl.kl_coef' else 'as the batch before left it' end as why
    from coefficient_moves
    -- what a run goes on from is in its checkpoint
    where kind = 'fixed' or (left_at is null and global_steps = 1) or left_in >= global_steps - 1
)
where abs(coef - wanted) > 1e-9 * abs(wanted)
union all
select rid, null, printf('coefficient %.9g after it', moved), printf('%.9g', then_coef),
    printf('it was %.9g; KL %.6g over %d trajectories', coef, kl, trajectories), null
from coefficient_moves
where kind = 'adaptive' and abs(then_coef - moved) > 1e-9 * abs(moved)
union all
select m.rid, null, printf('a KL from %.6g to %.6g', p.low, p.high), printf('%.6g', m.kl),
    printf('the mean over %d trajectories of what each has a token, as the controller is told', p.rows_of), null
from coefficient_moves as m
join (
    select rid, count(*) as rows_of, 1e-4 * avg(size / n_in) + 1e-6 as slack,
        avg(case when kind in ('kl', 'k1') then k1 else kl_least(kind, d, m, n_in) end / n_in) as low,
        avg(case when kind in ('kl', 'k1') then k1 else kl_most(kind, d, m) end / n_in) as high
    from penalties where kind in ('kl', 'k1', 'abs', 'mse', 'k2', 'low_var_kl', 'k3')
    group by rid
) as p using (rid)
where p.rows_of = m.trajectories and (m.kl < p.low - p.slack or m.kl > p.high + p.slack)
