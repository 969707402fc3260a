-- code: VER006
-- name: what is frozen stays, what trains moves
-- severity: error
-- says: Frozen parameters keep the fingerprint they had at the start; after an update that was not skipped, with lr > 0 and a gradient, the actor's weights are not what they were (a warning where its dtype or so small an lr may round the change away).
-- needs: weights, fingerprint
-- fields: parameters
-- examines: select coalesce(sum(n), 0) from events where op = 'sync' and entity = 'param' and weights.phase = 'actor' and c is not null and global_steps > 0
-- subsumed_by:
-- source: a frozen base under an adapter; optimiser steps move what trains
-- causes: The weights that are published come from a copy that is not the one that trains, an adapter is left out of them, or merging and unmerging it changed the base.
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
create or replace temp table steps_taken as
select coalesce(run_id, '') as run, ord, optim.lr as lr, optim.grad_norm as grad_norm
from events
where op = 'optim_step' and not coalesce(optim.skipped, false) and optim.lr > 0 and optim.grad_norm > 0
    and isfinite(optim.grad_norm);
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
unmoved as (
    select l.*, t.lr, t.grad_norm
    from (
        select *, lag(c) over (partition by run order by ord) as last_c, lag(ord) over (partition by run order by ord) as since
        from actor_sides where op = 'sync'
    ) as l
    join lateral (
        select max(lr) as lr, max(grad_norm) as grad_norm from steps_taken as t
        where t.run = l.run and t.ord < l.ord and t.ord > l.since
    ) as t on t.lr is not null
    where l.c = l.last_c
)
select l.rid, k.key, printf('%x', f.fingerprint) as expected, printf('%x', p.fingerprint) as actual,
    'a frozen parameter' as detail, null as severity
from later as l
join param_cells as p using (rid)
join first_prints as f on f.run = l.run and f.id = p.id
join keys as k on k.id = p.id
where p.fingerprint <> f.fingerprint
union all
select rid, null, 'weights changed by the update', 'the fingerprints of the last sync, all of them',
    printf('lr %g, gradient norm %g', lr, grad_norm),
    case when dtype = 'float32' and lr >= said('weights.seen_lr') and grad_norm >= said('weights.seen_gradient') then null else 'warning' end
from unmoved
