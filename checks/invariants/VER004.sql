-- code: VER004
-- name: old log-probs are of the weights before the update
-- severity: error
-- says: The weights that computed old_log_probs are the actor's before this step's updates of those rows, for all of them: where the sampler and the first pass of the update agree on a batch, so do its old log-probs.
-- needs: weights, key
-- fields: old_log_probs
-- examines: select coalesce(sum(n), 0) from events where stage = 'old_log_prob' and op = 'forward' and field = 'log_probs' and weights.version is not null
-- subsumed_by: VER001, LGP001, LGP003, LGP004, LGP005, LGP009, LEN001, LEN004, LEN006, LEN008, TOK001, QUE003, MSK002
-- source: the proximal anchor of PPO; verl computes it once a batch, before the first mini-batch
-- causes: The anchor was computed after the policy had moved, for the last part of a batch that does not divide or again in each epoch, or by another copy of the weights; or the pass that made it was given something else than the others (positions, attention mask, dropout).
-- reports: huggingface/trl#3493
-- faults: anchor_has_the_next_version, anchor_of_a_copy_that_decays, anchor_of_weights_in_fewer_bits, later_mini_batches_anchor_themselves
create or replace temp table anchors as
select rid, ord, run_id, global_steps, k, n, weights.version as version, weights.phase as phase,
    synchronous(run_id) as in_turn
from events
where stage = 'old_log_prob' and op = 'forward' and field = 'log_probs' and weights.version is not null and n > 0;
create or replace temp table moves as
select run_id, global_steps, min(ord) as ord
from events
where op = 'optim_step' and not coalesce(optim.skipped, false)
group by all;
create or replace temp table late_anchors as
select a.*, m.ord as moved
from anchors as a
join moves as m on m.run_id is not distinct from a.run_id and m.global_steps = a.global_steps and m.ord < a.ord;
create or replace temp table odd_ones as
-- sampler and update were not held against each other token by token: their sums over each row are
with apart as (
    -- none in a sound run, and then nothing is looked up
    select rid from sampler_pairs group by rid having sum(absdiff_sum) > any_value(band) * sum(n_in)
),
sampled as materialized (
    select s.rid, e.step_id, s.id, s.band, s.absdiff_sum, s.n_in
    from sampler_pairs as s join events as e using (rid)
    where s.rid in (select rid from apart)
),
trained as (
    select e.step_id, p.id, p.absdiff_sum, p.n_in
    from pair_cells as p
    join events as e using (rid)
    join update_batches as f
        on f.run_id is not distinct from e.run_id and f.global_steps = e.global_steps and f.update_index = e.update_index
    where e.op = 'compare' and e.stage = 'update_actor' and e.field = 'log_probs' and e.against = 'old_log_probs'
        and e.update_index = f.first_update and p.n_in > 0 and e.step_id in (select step_id from sampled)
),
drawn as (
    select step_id, id, arg_min("sum_in", ord) as total, arg_min(mask_sum, ord) as tokens
    from token_sum_cells
    where field = 'rollout_log_probs' and op = 'produce' and step_id in (select step_id from sampled)
    group by step_id, id
),
scored as (
    select step_id, id, arg_min("sum_in", ord) as total, arg_min(mask_sum, ord) as tokens
    from token_sum_cells
    where field = 'log_probs' and op = 'forward' and step_id in (select step_id from sampled)
    group by step_id, id
)
select rid, band, tokens, off_sampler, off_update, apart
from (
    select s.rid, any_value(s.band) as band, cast(sum(s.n_in) as bigint) as tokens, sum(s.absdiff_sum) as off_sampler,
        sum(t.absdiff_sum) as off_update, sum(abs(d.total - n.total)) as apart
    from sampled as s
    join trained as t using (step_id, id)
    join drawn as d using (step_id, id)
    join scored as n using (step_id, id)
    where s.n_in = t.n_in and d.tokens = s.n_in and n.tokens = s.n_in
    group by s.rid
)
where off_sampler > band * tokens and off_update > band * tokens and apart <= band * tokens
    and 4 * apart <= least(off_sampler, off_update) and tokens >= 8;
-- A step may train on several batches: rows that come after the first update of others are late only for their own.
with trained as (
    select distinct l.rid, l.k, k.id
    from late_anchors as l
    join events as u
        on u.run_id is not distinct from l.run_id and u.global_steps = l.global_steps and u.ord < l.ord
        and u.stage = 'update_actor' and u.op = 'consume' and u.field in ('old_log_probs', 'advantages', 'input_ids')
        and u.entity = 'trajectory'
    join keyed as k on k.k = u.k
),
late as (
    select t.rid, t.id from trained as t join keyed as k on k.k = t.k and k.id = t.id
)
select rid, key, 'before the first update of these rows' as expected, 'after it' as actual,
    'the policy is measured against itself' as detail, null as severity
from late join keys using (id)
union all
select a.rid, null, 'the actor''s weights', 'the ' || a.phase || '''s', null, null
from anchors as a
where a.phase not in ('actor')
union all
select a.rid, null, 'version ' || (a.global_steps - 1), 'version ' || a.version,
    'the weights before this step''s updates', null
from anchors as a
where a.in_turn and a.phase = 'actor' and a.version <> a.global_steps - 1
    and not (a.version = a.global_steps and a.rid in (select rid from late_anchors))
union all
select m.rid, null, printf('within %g nats of sampler and update, which agree', m.band),
    printf('%.6g from the sampler, %.6g from the update', m.off_sampler / m.tokens, m.off_update / m.tokens),
    printf('%d policy tokens; the sampler and the update are %.6g apart', m.tokens, m.apart / m.tokens), null
from odd_ones as m
