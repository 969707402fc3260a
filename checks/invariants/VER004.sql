-- code: VER004
-- name: old log-probs are of the weights before the update
-- severity: error
-- says: The weights that computed old_log_probs are the actor's before this step's updates of those rows, for all of them.
-- needs: weights, key
-- fields: old_log_probs
-- examines: select coalesce(sum(n), 0) from events where stage = 'old_log_prob' and op = 'forward' and field = 'log_probs' and weights.version is not null
-- subsumed_by: VER001
-- source: the proximal anchor of PPO; verl computes it once a batch, before the first mini-batch
-- causes: The anchor was computed after the policy had moved, for the last part of a batch that does not divide or again in each epoch, or by another copy of the weights.
-- reports: huggingface/trl#3493
-- faults: anchor_has_the_next_version, later_mini_batches_anchor_themselves
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
