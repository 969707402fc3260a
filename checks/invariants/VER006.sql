-- code: VER006
-- name: what is frozen stays, what trains moves
-- severity: error
-- says: Of a run whose configuration has no adapter every parameter trains; frozen parameters keep the fingerprint they had at the start; after an update that was not skipped, with lr > 0 and a gradient, the actor's weights are not what they were (a warning where its dtype or so small an lr may round the change away; nothing where by AdamW's eps it is below 1e-12), and neither is any tensor of them that trains, has moved before or was seen to have a gradient, and has one (a warning of one that trains and has none, while others do).
-- needs: weights, fingerprint
-- fields: parameters
-- examines: select coalesce(sum(n), 0) from events where op = 'sync' and entity = 'param' and weights.phase = 'actor' and c is not null and global_steps > 0
-- subsumed_by: LOS003
-- source: a frozen base under an adapter; optimiser steps move what trains
-- causes: The weights that are published come from a copy that is not the one that trains, an adapter is left out of them, merging and unmerging it changed the base, a part of the model was frozen for a trial, or a tensor is in no group of the optimiser, or is written back after the step.
-- reports: huggingface/trl#6688, modelscope/ms-swift#8275, modelscope/ms-swift#9855
-- faults: adapter_is_never_sent, decay_reaches_what_is_frozen, embedding_is_in_no_group, embeddings_are_frozen_from_the_start, one_layer_is_written_back, one_norm_is_written_back, stale_head_is_sent, weights_are_copied_before_the_step
create or replace temp table actor_sides as
select rid, ord, coalesce(run_id, '') as run, global_steps, stage, op, dtype, c
from events
where entity = 'param' and n > 0 and c is not null and weights.phase = 'actor';
create or replace temp table first_sides as
select run, arg_max(rid, ord) as rid, arg_max(dtype, ord) as dtype, max(ord) as ord
from actor_sides
where stage = 'init'
group by run;
create or replace temp table frozen_cells as
select distinct s.run, p.id
from param_cells as p join actor_sides as s using (rid)
where p.status = 'frozen';
-- A trainer that can freeze parts of a model has settings for it that are not known here. A table of positions is
-- frozen by the code of some models.
create or replace temp table all_train as
select rid
from (select f.rid, e.run_id from first_sides as f join events as e using (rid))
where said('weights.all_train') = 1 and setting(run_id, 'actor_rollout_ref.model.lora_rank') = '0';
create or replace temp table steps_taken as
select coalesce(run_id, '') as run, ord, optim.lr as lr, optim.grad_norm as grad_norm
from events
where op = 'optim_step' and not coalesce(optim.skipped, false) and optim.lr > 0 and optim.grad_norm > 0
    and isfinite(optim.grad_norm)
    -- what AdamW makes of a gradient far below its eps is less than the last bit of any weight
    and optim.lr * least(1, coalesce(optim.grad_norm / nullif(try_cast(attrs['eps'] as double), 0), 1)) > 1e-12;
create or replace temp table looks as
select coalesce(run_id, '') as run, ord, optim.lr as lr, optim.grad_norm as grad_norm,
    string_split(attrs['without_gradient'], ',') as without, string_split(attrs['weak_gradient'], ',') as weak
from events
where op = 'optim_step' and attrs['without_gradient'] is not null and not coalesce(optim.skipped, false);
with first_prints as (
    select f.run, f.id, p.fingerprint
    from frozen_cells as f
    join first_sides as s on s.run = f.run
    join param_cells as p on p.rid = s.rid and p.id = f.id
),
later as (
    select s.* from actor_sides as s join first_sides as f on f.run = s.run and f.dtype = s.dtype and s.ord > f.ord
    where s.run in (select run from frozen_cells)
),
-- The weights of a sync are those of an earlier one, or of the start, though an update came between.
again as (
    select l.rid, l.dtype, l.run, l.ord, max(b.ord) as since, max_by(b.global_steps, b.ord) as back_to
    from actor_sides as l join actor_sides as b on b.run = l.run and b.c = l.c and b.ord < l.ord
    where l.op = 'sync' and (b.op = 'sync' or b.stage = 'init')
    group by all
),
unmoved as (
    select a.rid, a.dtype, a.back_to, max(t.lr) as lr, max(t.grad_norm) as grad_norm
    from again as a join steps_taken as t on t.run = a.run and t.ord < a.ord and t.ord > a.since
    group by all
),
-- One tensor among the others that is again what it was at the start, after it had moved.
returned as (
    select p.rid, p.id, p.fingerprint, before.fingerprint as had
    from (
        select *, lag(rid) over (partition by run order by ord) as last_rid from actor_sides where op = 'sync'
    ) as l
    join first_sides as s on s.run = l.run and s.dtype = l.dtype and l.dtype = 'float32'
    join param_cells as p on p.rid = l.rid
    join param_cells as first on first.rid = s.rid and first.id = p.id and first.fingerprint = p.fingerprint
    join param_cells as before on before.rid = l.last_rid and before.id = p.id and before.fingerprint <> p.fingerprint
    where p.length >= 1000 and l.rid not in (select rid from unmoved)
),
-- One tensor among the others that is still what it was, though there was a gradient for it: of a large one some
-- number is small enough to show any change, of a small one all may be near 1.
resting as (
    select l.rid, k.id, k.key, bool_or(not list_contains(t.without, k.key) and case
            when t.weak is not null then not list_contains(t.weak, k.key)
            -- what has moved before goes on by its moments, whatever its gradient
            else p.fingerprint <> first.fingerprint and k.key not like '%expert%'
        end) as had_gradient
    from (
        select *, lag(rid) over before as last_rid, lag(ord) over before as last_ord, lag(dtype) over before as last_dtype
        from actor_sides where op = 'sync' window before as (partition by run order by ord)
    ) as l
    join param_cells as p on p.rid = l.rid
    join param_cells as had on had.rid = l.last_rid and had.id = p.id and had.fingerprint = p.fingerprint
    join first_sides as s on s.run = l.run
    join param_cells as first on first.rid = s.rid and first.id = p.id and first.status = 'trainable'
    join keys as k on k.id = p.id
    join looks as t on t.run = l.run and t.ord > l.last_ord and t.ord < l.ord
    where l.dtype = 'float32' and l.last_dtype = 'float32' and l.rid not in (select rid from unmoved)
        and t.lr >= if(p.length >= 1000, 10, 1000) * said('weights.seen_lr')
        and t.grad_norm >= said('weights.seen_gradient')
    group by l.rid, k.id, k.key
    -- no token may have chosen an expert
    having had_gradient or (bool_and(list_contains(t.without, k.key)) and k.key not like '%expert%')
)
select a.rid, k.key, 'a tensor that trains: lora_rank 0' as expected, 'frozen from the start' as actual,
    'status of the parameter' as detail, null as severity
from all_train as a join param_cells as p using (rid) join keys as k on k.id = p.id
where p.status = 'frozen' and k.key not like '%position%'
union all
select l.rid, k.key, printf('%x', f.fingerprint) as expected, printf('%x', p.fingerprint) as actual,
    'a frozen parameter' as detail, null as severity
from later as l
join param_cells as p using (rid)
join first_prints as f on f.run = l.run and f.id = p.id
join keys as k on k.id = p.id
where p.fingerprint <> f.fingerprint
union all
select rid, null, 'weights changed by the update', 'all of them as they were after step ' || back_to,
    printf('lr %g, gradient norm %g', lr, grad_norm),
    case
        when not (dtype = 'float32' and lr >= said('weights.seen_lr') and grad_norm >= said('weights.seen_gradient'))
            then 'warning'
    end
from unmoved
union all
select rid, key, 'a tensor that moves with the others', 'as it was before the update',
    if(had_gradient, 'it trains, and had a gradient', 'it trains, and no gradient has reached it'),
    if(had_gradient, null, 'warning')
from resting
union all
select rid, key, 'what the update before left, ' || printf('%x', had) || ', or newer', printf('%x', fingerprint),
    'the first weights again, under this name alone', null
from returned join keys using (id)
