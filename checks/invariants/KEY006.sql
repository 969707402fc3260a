-- code: KEY006
-- name: every row trains once an epoch
-- severity: error
-- says: Every key handed to an update is in exactly one mini-batch of each PPO epoch: none is lost or doubled by the split, its remainder or the shuffle.
-- needs: key, mini_batch
-- fields:
-- stored: micro_batch
-- examines: select sum(n) from events where stage = 'update_actor' and op = 'split' and mini_batch is not null and micro_batch is null and ppo_epoch is not null
-- subsumed_by: BAT001, TOP002, KEY005
-- source: TRL's buffer walked over more slices than were generated; open-instruct dropped what did not divide
-- causes: The remainder of the split was dropped, rows were drawn with replacement, every rank shuffled by another seed, or the index into the buffer ran on by the wrong period.
-- reports: NVIDIA-NeMo/RL#648, huggingface/trl#3532
-- faults: buffer_index_of_the_wrong_period, iterator_used_up, last_mini_batch_dropped, later_epochs_draw_with_replacement
create or replace temp table epoch_rows as
with handed as (
    select step_id, coalesce(attrs['sub_step'], '') as sub_step, op, k, n, rid, ord, ppo_epoch
    from events
    where entity = 'trajectory' and k is not null and leads
        and ((stage = 'update_actor' and op = 'dispatch')
            or (stage = 'update_actor' and op = 'split' and mini_batch is not null and micro_batch is null and ppo_epoch is not null)
            or (op = 'reorder' and field = 'key'))
),
given as (
    select step_id, sub_step,
        case when bool_or(op = 'dispatch') then 'dispatch' else 'reorder' end as how,
        max(ord) filter (op = 'reorder') as last_order
    from handed where op <> 'split'
    group by all
)
select h.*, sum(h.n) over one as rows_given, cast(sum(h.k) over one % 18446744073709551616 as ubigint) as whole
from handed as h join given as g using (step_id, sub_step)
where h.op = 'split' or (h.op = g.how and (g.how = 'dispatch' or h.ord = g.last_order))
window one as (partition by step_id, sub_step, h.op = 'split', h.ppo_epoch);
with epochs as (
    select step_id, sub_step, ppo_epoch, any_value(whole) as k, max_by(rid, ord) as last_rid
    from epoch_rows where op = 'split'
    group by all
),
updates as (
    select step_id, sub_step, any_value(whole) as k from epoch_rows where op <> 'split' group by all
),
doubtful as (
    select e.step_id, e.sub_step, e.ppo_epoch, e.last_rid
    from epochs as e join updates as u using (step_id, sub_step)
    where e.k is distinct from u.k
),
counted as (
    select d.step_id, d.sub_step, d.ppo_epoch, d.last_rid, id,
        count(*) filter (r.op <> 'split') as handed,
        count(*) filter (r.op = 'split') as trained,
        max_by(r.rid, r.ord) filter (r.op = 'split') as rid
    from doubtful as d
    join epoch_rows as r
        on r.step_id = d.step_id and r.sub_step = d.sub_step and (r.op <> 'split' or r.ppo_epoch = d.ppo_epoch)
    join keyed using (k)
    group by all
)
select coalesce(case when trained > handed then rid end, last_rid) as rid, key,
    handed || ' times' as expected, trained || ' times' as actual,
    printf('in the mini-batches of epoch %d', ppo_epoch) as detail, null as severity
from counted join keys using (id)
where trained <> handed
