-- code: BAT002
-- name: as many updates as the batch asks for
-- severity: error
-- says: An update of N rows, padding included, takes E x N / (M x G) optimiser steps, each on a mini-batch of M x G rows. A warning where N is not B x G although no group failed, was refilled, padded or had several outputs.
-- needs: mini_batch
-- fields:
-- stored: micro_batch
-- examines: select count(*) from events where stage = 'update_actor' and op = 'split' and mini_batch is not null and micro_batch is null and step_id in (select step_id from events where stage = 'update_actor' and op = 'dispatch')
-- subsumed_by: BAT001, KEY006
-- source: the batch arithmetic of verl's trainer: B, M and E count prompts, the actor sees trajectories
-- causes: ppo_mini_batch_size was taken for trajectories or not scaled by rollout.n, ppo_epochs did not reach the loop, or the optimiser stepped once a micro-batch (or not at all) because gradient accumulation was counted otherwise.
-- reports: OpenRLHF/OpenRLHF#577, verl-project/verl#853
-- faults: epochs_do_not_reach_the_loop, mini_batch_not_scaled_by_n, optimiser_steps_once_a_micro_batch
create or replace temp table sized as
with asked as (
    select run_id,
        try_cast(setting(run_id, 'actor_rollout_ref.actor.ppo_mini_batch_size') as bigint)
            * try_cast(setting(run_id, 'actor_rollout_ref.rollout.n') as bigint) as mini_rows,
        try_cast(setting(run_id, 'actor_rollout_ref.actor.ppo_epochs') as bigint) as epochs,
        try_cast(setting(run_id, 'data.train_batch_size') as bigint)
            * try_cast(setting(run_id, 'actor_rollout_ref.rollout.n') as bigint)
            // coalesce(try_cast(setting(run_id, 'trainer.v1.sync.parameter_sync_step') as bigint), 1) as batch_rows
    from (select distinct run_id from events)
),
handed as (
    select step_id, coalesce(attrs['sub_step'], '') as sub_step, sum(n) as n
    from events
    where stage = 'update_actor' and op = 'dispatch' and leads
    group by all
),
minis as (
    select step_id, run_id, coalesce(attrs['sub_step'], '') as sub_step, ppo_epoch, mini_batch, min(ord) as ord,
        -- of ranks that split each for itself, the one whose share is off
        min_by(rid, (-abs(n * dp_size - mini_size), ord)) as rid, sum(n) as n, count(distinct coord.dp) as ranks,
        max(coalesce(topology.reported_dp, try_cast(attrs['dp_size'] as bigint))) as dp,
        max(try_cast(attrs['mini_batch_size'] as bigint)) as said_rows, max(try_cast(attrs['epochs'] as bigint)) as said_epochs
    from (
        select *, case when coord.dp is null then 1 else coalesce(try_cast(attrs['dp_size'] as bigint), 1) end as dp_size,
            coalesce(try_cast(attrs['mini_batch_size'] as bigint), 0) as mini_size
        from events
        where stage = 'update_actor' and op = 'split' and mini_batch is not null and micro_batch is null and leads
    )
    group by all
)
select m.*, h.n as given, a.batch_rows,
    coalesce(a.mini_rows, m.said_rows) as mini_rows, coalesce(a.epochs, m.said_epochs) as epochs,
    count(*) over one as made, row_number() over (partition by m.step_id, m.sub_step order by m.ord) as place,
    last_value(m.rid) over (partition by m.step_id, m.sub_step order by m.ord
        rows between unbounded preceding and unbounded following) as last_rid
from minis as m
join handed as h using (step_id, sub_step)
left join asked as a on a.run_id is not distinct from m.run_id
window one as (partition by m.step_id, m.sub_step);
with steps as (
    -- of several processes each takes all of them
    select run_id, step_id, max(taken) as taken, max(rid) as rid
    from (
        select run_id, step_id, count(*) as taken, max_by(rid, ord) as rid
        from events
        where stage = 'update_actor' and op = 'optim_step'
        group by run_id, step_id, process
    )
    group by run_id, step_id
),
planned as (
    select run_id, step_id, count(*) as made, max_by(rid, ord) as rid from sized group by run_id, step_id
),
uneven as (
    select * from sized
    where place = 1 and given <> batch_rows and step_id not in (
        select step_id from events where op = 'pad' and stage = 'balance' and field = 'key' and n > 0
        union
        select step_id from group_cells where reason is not null or status = 'failure'
        union
        select e.step_id from events as e join keyed using (k) join keys as t using (id)
        where e.stage = 'sample' and e.op = 'produce' and e.field = 'key' and t."index" > 0
            and e.step_id in (select step_id from sized where given <> batch_rows)
    )
)
select rid, null as key, printf('%d rows (M x G)', mini_rows) as expected, printf('%d rows', n) as actual,
    printf('mini-batch %d of epoch %d', mini_batch, ppo_epoch) as detail, null as severity
from sized
where mini_rows > 0 and given % mini_rows = 0 and n <> mini_rows and not (ranks <= 1 and n * dp = mini_rows)
union all
select last_rid, null, printf('%d mini-batches, E x N / (M x G)', epochs * ((given + mini_rows - 1) // mini_rows)), printf('%d', made),
    printf('E %d, N %d, M x G %d', epochs, given, mini_rows), null
from sized
where place = 1 and mini_rows > 0 and epochs > 0
    and made not between epochs * (given // mini_rows) and epochs * ((given + mini_rows - 1) // mini_rows)
union all
select coalesce(s.rid, p.rid), null, printf('%d optimiser steps, one a mini-batch', p.made),
    printf('%d', coalesce(s.taken, 0)), null, null
from planned as p left join steps as s using (step_id)
where p.made <> coalesce(s.taken, 0)
    and exists (select 1 from steps as one where one.run_id is not distinct from p.run_id)
union all
select rid, null, printf('%d rows, B x G', batch_rows), printf('%d rows', given),
    'no group failed, was left out, padded or had several outputs', 'warning'
from uneven
