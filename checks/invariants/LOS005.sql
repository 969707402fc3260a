-- code: LOS005
-- name: the loss recomputes
-- severity: error
-- says: A numerator is the sum of its rows' losses as the mode takes them; before the first update a row's policy loss is minus its advantages, times the importance weights, which are the cut ratios of old to rollout, its KL one that log-probs so far apart have, and its entropy the one that was measured with the old log-probs; afterwards the policy loss is within the clip's bounds, which are the configured ones; the KL is the configured estimate of KL(policy || reference), not of its reverse; a logged actor/ metric is the mean over the optimiser steps.
-- needs: loss, sum_in
-- fields: loss
-- examines: select count(*) from events where (loss is not null and update_index is not null) or (stage = 'update_actor' and op = 'forward' and field in ('pg_loss', 'kl_loss', 'entropy_loss'))
-- subsumed_by: LOS001, LOS002, LOS003, LEN004, LGP002, LGP003, LGP005, LGP006, LGP009, ADV001, ADV002, ADV004, QUE003, MSK002, KEY003, LGP001, VER004
-- source: verl's agg_loss and compute_policy_loss_vanilla; a sequence mean divided by its length twice seen in ROLL
-- causes: The aggregation is not that of its name, the advantage met another row's ratio, the clip was put on the other side, weights were applied twice, a metric averages what it should add, or the entropy is of another temperature or in another unit.
-- reports: alibaba/ROLL@d8d7e78f, verl-project/verl#3699
-- faults: advantage_of_the_row_beside, clip_of_the_code, clip_on_the_wrong_side, divided_by_the_length_twice, entropy_bonus_in_bits, entropy_bonus_without_temperature, importance_weights_twice, importance_weights_upside_down, kl_of_the_reference_to_the_policy, kl_to_the_old_policy, logged_loss_of_the_last_micro_batch, metrics_of_the_first_part, metrics_of_the_last_update, numerator_over_the_padding, policy_loss_with_the_wrong_sign
create or replace temp table row_losses as
select c.rid, c.id, c.field, c.sum_in, c.min_in, c.max_in, c.mask_sum, e.run_id, e.process, e.global_steps, e.step_id,
    e.update_index, e.micro_batch, e.coord.dp as dp
from loss_cells as c join events as e using (rid)
where c.stage = 'update_actor';
create or replace temp table policy_rows as
with weights_of as (
    select step_id, id, any_value(sum_in) as weight from loss_cells where field = 'rollout_is_weights' group by step_id, id
),
advantages_of as (
    select step_id, id, any_value(sum_in) as added, any_value(min_in) as least, any_value(max_in) as greatest,
        any_value(mask_sum) as tokens
    from advantage_cells where field = 'advantages' group by step_id, id
),
settings as (
    select run_id, band(run_id) as band,
        coalesce(setting(run_id, 'algorithm.rollout_correction.bypass_mode'), 'false') = 'true' as bypass,
        setting(run_id, 'algorithm.rollout_correction.rollout_is') is not null as weighed,
        coalesce(setting(run_id, 'actor_rollout_ref.actor.policy_loss.loss_mode'), 'vanilla') = 'vanilla' as vanilla,
        try_cast(setting(run_id, 'actor_rollout_ref.actor.clip_ratio') as double) as clip,
        try_cast(setting(run_id, 'actor_rollout_ref.actor.clip_ratio_low') as double) as low,
        try_cast(setting(run_id, 'actor_rollout_ref.actor.clip_ratio_high') as double) as high,
        try_cast(setting(run_id, 'actor_rollout_ref.actor.clip_ratio_c') as double) as dual
    from (select distinct run_id from row_losses)
)
select r.rid, r.id, r.sum_in, r.min_in, r.max_in, r.mask_sum, a.added, a.least, a.tokens, w.weight, s.band,
    not s.bypass and r.update_index = b.first_update and (not s.weighed or w.weight is not null) as first,
    a.least = a.greatest as flat, s.vanilla and not s.weighed and s.clip is not null as bounded,
    greatest(abs(a.least), abs(a.greatest)) as size, 1 + coalesce(s.high, s.clip) as top, 1 - coalesce(s.low, s.clip) as bottom,
    s.dual
from row_losses as r
join advantages_of as a using (step_id, id)
join settings as s on s.run_id is not distinct from r.run_id
join update_batches as b
    on b.run_id is not distinct from r.run_id and b.global_steps = r.global_steps and b.update_index = r.update_index
left join weights_of as w on w.step_id = r.step_id and w.id = r.id
where r.field = 'pg_loss' and r.mask_sum > 0 and a.tokens > 0;
create or replace temp table weight_rows as
-- weights are exp(old - rollout) of each token, or of the whole row: so far as those were found apart, and no more
select c.rid, c.id, c.sum_in, c.min_in, c.max_in, c.mask_sum, p.absdiff_max as m, p.absdiff_sum as s,
    o.sum_in - r.sum_in as d, setting(e.run_id, 'algorithm.rollout_correction.rollout_is') as level,
    coalesce(try_cast(setting(e.run_id, 'algorithm.rollout_correction.rollout_is_threshold') as double), 'inf') as cut
from loss_cells as c
join events as e using (rid)
join pair_cells as p on p.step_id = c.step_id and p.id = c.id and p.field = 'old_log_probs' and p.against = 'rollout_log_probs'
join token_sum_cells as o on o.step_id = c.step_id and o.id = c.id and o.field = 'old_log_probs'
join token_sum_cells as r on r.step_id = c.step_id and r.id = c.id and r.field = 'rollout_log_probs'
where c.field = 'rollout_is_weights' and c.mask_sum > 0 and c.mask_sum = p.n_in and o.mask_sum = p.n_in
    and r.mask_sum = p.n_in
    and coalesce(setting(e.run_id, 'algorithm.rollout_correction.rollout_is_batch_normalize'), 'false') <> 'true';
create or replace temp table kl_rows as
-- before the first update the policy is the old one, whose distance from the reference was measured: so much bounds
-- every estimator of the KL
select r.rid, r.id, r.sum_in, p.n_in, p.absdiff_sum as d, p.absdiff_max as m, band(r.run_id) as band,
    rtrim(setting(r.run_id, 'actor_rollout_ref.actor.kl_loss_type'), '+') as kind
from row_losses as r
join (
    select step_id, id, n_in, absdiff_sum, absdiff_max from pair_cells
    where field = 'ref_log_prob' and against = 'old_log_probs' and n_in > 0
) as p using (step_id, id)
join update_batches as b
    on b.run_id is not distinct from r.run_id and b.global_steps = r.global_steps and b.update_index = r.update_index
where r.field = 'kl_loss' and r.update_index = b.first_update and r.mask_sum = p.n_in
    and coalesce(setting(r.run_id, 'algorithm.rollout_correction.bypass_mode'), 'false') <> 'true';
create or replace temp table entropy_rows as
-- before the first update the policy is the old one, whose entropy the driver has
select r.rid, r.id, r.sum_in, r.mask_sum, m.measured, band(r.run_id) as band
from row_losses as r
join (
    select step_id, id, any_value(sum_in) as measured, any_value(mask_sum) as tokens
    from token_sum_cells where field = 'entropy' and op = 'produce' and mask_sum > 0 group by step_id, id
) as m using (step_id, id)
join update_batches as b
    on b.run_id is not distinct from r.run_id and b.global_steps = r.global_steps and b.update_index = r.update_index
where r.field = 'entropy_loss' and r.update_index = b.first_update and r.mask_sum > 0 and r.mask_sum = m.tokens
    and coalesce(setting(r.run_id, 'algorithm.rollout_correction.bypass_mode'), 'false') <> 'true';
with sums as (
    select run_id, process, global_steps, update_index, micro_batch, dp, field, sum(sum_in) as added,
        sum(sum_in / mask_sum) filter (mask_sum > 0) as means,
        sum(greatest(abs(min_in), abs(max_in)) * mask_sum) as size
    from row_losses
    group by all
),
numerators as (
    select l.rid, l.loss.term as term, l.loss.mode as mode, l.loss.numerator as numerator, s.size,
        case when l.loss.mode = 'seq-mean-token-mean' then coalesce(s.means, 0) else s.added end as whole
    from events as l
    join sums as s
        on s.run_id is not distinct from l.run_id and s.process is not distinct from l.process
        and s.global_steps = l.global_steps and s.update_index = l.update_index
        and s.micro_batch is not distinct from l.micro_batch and s.dp is not distinct from l.coord.dp
        and s.field = l.loss.term
    where l.loss is not null and l.loss.mode in ('token-mean', 'seq-mean-token-sum', 'seq-mean-token-mean')
),
terms as (
    select e.run_id, e.global_steps, b.first_update, any_value(b.trajectories) as trajectories, e.update_index,
        'actor/' || e.loss.term as name, sum(e.loss.numerator / e.loss.denominator) as value
    from events as e
    join update_batches as b
        on b.run_id is not distinct from e.run_id and b.global_steps = e.global_steps and b.update_index = e.update_index
    where e.loss is not null
    group by e.run_id, e.global_steps, b.first_update, e.update_index, e.loss.term
    union all
    select e.run_id, e.global_steps, b.first_update, b.trajectories, e.update_index, 'actor/grad_norm', e.optim.grad_norm
    from events as e
    join update_batches as b
        on b.run_id is not distinct from e.run_id and b.global_steps = e.global_steps and b.update_index = e.update_index
    where e.op = 'optim_step'
),
means as (
    -- a step that trains on several batches weighs them by their trajectories
    select run_id, global_steps, name, sum(value * trajectories) / sum(trajectories) as value, max(abs(value)) as size
    from (
        select run_id, global_steps, first_update, name, avg(value) as value, any_value(trajectories) as trajectories
        from terms group by run_id, global_steps, first_update, name
    )
    group by run_id, global_steps, name
),
logged as (
    select c.rid, keys.key as name, c."sum" as value, m.value as whole, m.size
    from group_cells as c join keys using (id) join events as e on e.rid = c.rid
    join means as m on m.run_id is not distinct from e.run_id and m.global_steps = e.global_steps and m.name = keys.key
    where c.field = 'metrics'
),
weighed as (
    select *, case when flat then -least * coalesce(weight, mask_sum) else -added end as whole
    from policy_rows
    where first and (flat or (weight is null and mask_sum = tokens))
)
select rid, term as key, printf('%.9g', whole) as expected, printf('%.9g', numerator) as actual,
    printf('%s of the rows of the micro-batch', mode) as detail, null as severity
from numerators
where abs(numerator - whole) > said('loss.relative') * size + 1e-9
union all
select rid, keys.key, printf('%.6g, minus its advantages', whole), printf('%.6g', sum_in),
    printf('policy loss over %d tokens, before the first update', mask_sum), null
from weighed join keys using (id)
where abs(sum_in - whole) > (2 * band + said('loss.relative')) * size * greatest(mask_sum, coalesce(weight, 0)) + 1e-9
union all
select rid, keys.key, printf('from %.6g to %.6g', bottom_loss, top_loss), printf('from %.6g to %.6g', min_in, max_in),
    printf('policy loss by token, of advantage %.6g under the clip', least), null
from (
    select *, case when least > 0 then -least * top else -least * bottom end as bottom_loss,
        case when least > 0 then 0 else -least * dual end as top_loss
    from policy_rows where flat and bounded
) join keys using (id)
where min_in < bottom_loss - said('loss.relative') * size or max_in > top_loss + said('loss.relative') * size
union all
select rid, keys.key, printf('from %.6g to %.6g', least, greatest), printf('%.6g', sum_in),
    printf('KL by %s, of log-probs %.6g apart over %d tokens', kind, d, n_in), null
from (
    select *, n_in * band * (m + band) as slack,
        kl_least(kind, d, m, n_in) as least, kl_most(kind, d, m) as greatest
    from kl_rows where kind in ('kl', 'k1', 'abs', 'mse', 'k2', 'low_var_kl', 'k3')
) join keys using (id)
where sum_in < least - slack or sum_in > greatest + slack
union all
select rid, keys.key, printf('%.6g, as it was measured', measured), printf('%.6g', sum_in),
    printf('entropy over %d tokens, before the first update', mask_sum), null
from entropy_rows join keys using (id)
where abs(sum_in - measured) > 2 * band * mask_sum + said('loss.relative') * abs(measured)
union all
select rid, keys.key, printf('sum from %.6g to %.6g, at most %g', least, greatest, cut),
    printf('sum %.6g, from %.6g to %.6g', sum_in, min_in, max_in),
    printf('importance weights of %d tokens by %s, of log-probs %.6g apart', mask_sum, level, d), null
from (
    select *,
        case level when 'sequence' then mask_sum * least(exp(d), cut)
            when 'token' then mask_sum * case when exp(m) > cut then 0 else exp(d / mask_sum) end end as least,
        case level when 'sequence' then mask_sum * least(exp(d), cut)
            when 'token' then mask_sum + d + exp(m) * m * s / 2 end as greatest
    from weight_rows
    where abs(d) < 20 and m < 20
) join keys using (id)
where max_in > cut * (1 + 1e-6) or sum_in < least - said('loss.relative') * mask_sum
    or sum_in > greatest + said('loss.relative') * mask_sum
union all
select rid, name, printf('%.9g', whole), printf('%.9g', value), 'mean over the optimiser steps, and as logged', null
from logged
where abs(value - whole) > said('loss.relative') * size + 1e-9
union all
select rid, 'pg_loss', printf('clip_ratio %g and %g, clip_ratio_c %g', low, high, dual),
    printf('%g and %g, %g', said_low, said_high, said_dual), 'the bounds the ratio was cut to', null
from (
    select e.rid, try_cast(e.attrs['clip_ratio_low'] as double) as said_low,
        try_cast(e.attrs['clip_ratio_high'] as double) as said_high, try_cast(e.attrs['clip_ratio_c'] as double) as said_dual,
        coalesce(try_cast(setting(e.run_id, 'actor_rollout_ref.actor.clip_ratio_low') as double),
            try_cast(setting(e.run_id, 'actor_rollout_ref.actor.clip_ratio') as double)) as low,
        coalesce(try_cast(setting(e.run_id, 'actor_rollout_ref.actor.clip_ratio_high') as double),
            try_cast(setting(e.run_id, 'actor_rollout_ref.actor.clip_ratio') as double)) as high,
        try_cast(setting(e.run_id, 'actor_rollout_ref.actor.clip_ratio_c') as double) as dual
    from events as e
    where e.loss.term = 'pg_loss' and e.attrs['clip_ratio_low'] is not null
)
where abs(said_low - low) > 1e-9 or abs(said_high - high) > 1e-9 or abs(said_dual - dual) > 1e-9
union all
select rid, 'kl_loss', printf('%.6g, the KL by %s', whole, kind), printf('%.6g', numerator),
    case when abs(numerator - reversed) < 0.1 * abs(numerator - whole) then 'that of the reference to the policy'
        else 'from the sums of what the loss read' end, null
from (
    select e.rid, e.loss.numerator as numerator, k.kind, whole, reversed, 1e-4 * abs(whole) + 1e-6 * e.loss.tokens as slack
    from events as e
    join (
        select rid, rtrim(setting(run_id, 'actor_rollout_ref.actor.kl_loss_type'), '+') as kind,
            try_cast(attrs['kl_gap'] as double) as gap, try_cast(attrs['kl_gap_squared'] as double) as squared,
            try_cast(attrs['kl_excess'] as double) as excess,
            try_cast(attrs['kl_gap_most'] as double) as most
        from events where loss.term = 'kl_loss' and attrs['kl_gap'] is not null
    ) as k using (rid),
    lateral (select case when kind in ('kl', 'k1') then -gap when kind in ('mse', 'k2') then squared / 2
            when kind in ('low_var_kl', 'k3') then excess end as whole,
        case when kind in ('kl', 'k1') then gap when kind in ('low_var_kl', 'k3') then squared - excess end as reversed)
    -- beyond it k3 is cut
    where e.loss.mode in ('token-mean', 'seq-mean-token-sum') and most < 2.5
)
where abs(numerator - whole) > slack
