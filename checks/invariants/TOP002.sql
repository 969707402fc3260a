-- code: TOP002
-- name: replicas share no row
-- severity: error
-- says: Data-parallel replicas are handed disjoint parts of the batch and train on what they were handed, M x G / DP rows of every mini-batch each; ranks of one replica see the same rows.
-- needs: key, coord
-- fields:
-- examines: select sum(n) from events where stage = 'update_actor' and op in ('dispatch', 'split') and coord.dp is not null
-- subsumed_by: BAT001, TOP001
-- source: S7 and S8; the dispatch of verl's single controller
-- causes: Every rank was given the first part, the rank's index was taken from the world instead of from the data-parallel group, or sequence-parallel ranks of one replica drew different rows.
-- faults: first_part_for_every_rank, ranks_in_another_order, ranks_slice_by_the_first_rank
create or replace temp table shares as
select rid, ord, step_id, op, k, n, coalesce(attrs['sub_step'], '') as sub_step, coalesce(ppo_epoch, -1) as epoch,
    coalesce(mini_batch, -1) as mini, coalesce(micro_batch, -1) as micro, coord.dp as dp, leads
from events
where stage = 'update_actor' and op in ('dispatch', 'split') and coord.dp is not null and k is not null;
create or replace temp table ranked as
-- what each replica holds of a dispatch, and of each mini-batch
select step_id, sub_step, op, epoch, mini, dp, cast(sum(k) % 18446744073709551616 as ubigint) as k, sum(n) as n,
    min_by(rid, ord) as rid, min(ord) as ord
from shares
where leads and (op = 'dispatch' or micro >= 0)
group by all;
with minis as (
    select e.step_id, coalesce(attrs['sub_step'], '') as sub_step, ppo_epoch as epoch, mini_batch as mini, rid, n,
        coalesce(topology.reported_dp, try_cast(attrs['dp_size'] as bigint)) as dp
    from events as e
    where stage = 'update_actor' and op = 'split' and micro_batch is null and mini_batch is not null and coord.dp is null
),
epochs as (
    select step_id, sub_step, epoch, dp, cast(sum(k) % 18446744073709551616 as ubigint) as k, sum(n) as n
    from ranked where op = 'split'
    group by all
),
astray as (
    -- a replica whose rows of an epoch are not those it was handed
    select e.step_id, e.sub_step, e.epoch, e.dp
    from epochs as e join ranked as d on d.op = 'dispatch' and d.step_id = e.step_id and d.sub_step = e.sub_step and d.dp = e.dp
    where e.k <> d.k
),
dealt as (
    select step_id, sub_step, cast(sum(k) % 18446744073709551616 as ubigint) as k
    from ranked where op = 'dispatch'
    group by all
),
orders as (
    select step_id, coalesce(attrs['sub_step'], '') as sub_step, arg_max(k, ord) as k
    from events where op = 'reorder' and field = 'key' and entity = 'trajectory'
    group by all
),
doubtful as (
    select distinct step_id, sub_step from astray
    union
    select d.step_id, d.sub_step
    from dealt as d left join orders as o using (step_id, sub_step)
    where d.k is distinct from o.k
),
held as (
    select s.step_id, s.sub_step, s.op, s.epoch, s.mini, s.dp, s.rid, s.ord, id
    from shares as s join doubtful using (step_id, sub_step) join keyed using (k)
    where leads and (op = 'dispatch' or micro >= 0)
),
twice as (
    select op, step_id, sub_step, epoch, mini, id, min(dp) as one, max(dp) as other, max_by(rid, ord) as rid
    from held
    group by all
    having min(dp) <> max(dp)
),
strange as (
    select h.rid, h.id, h.dp, d.dp as handed
    from held as h join held as d on d.op = 'dispatch' and d.step_id = h.step_id and d.sub_step = h.sub_step and d.id = h.id
    where h.op = 'split' and h.dp <> d.dp
),
replicas as (
    select step_id, sub_step, op, epoch, mini, micro, dp, min(rid) as first_rid, max_by(rid, ord) as rid,
        max_by(n, ord) as n, min_by(n, ord) as first_n
    from shares
    group by all
    having count(distinct leads) = 2 and count(distinct k) > 1
)
select coalesce(m.rid, t.rid) as rid, key, 'in one replica' as expected,
    printf('in those of DP rank %d and %d', one, other) as actual,
    case when t.op = 'dispatch' then 'dispatch' else printf('mini-batch %d of epoch %d', t.mini, t.epoch) end as detail,
    null as severity
from twice as t join keys using (id)
left join minis as m on t.op = 'split' and m.step_id = t.step_id and m.sub_step = t.sub_step and m.epoch = t.epoch and m.mini = t.mini
union all
select rid, key, printf('DP rank %d, where it was handed', handed), printf('DP rank %d', dp), 'trained on', null
from strange join keys using (id)
union all
select r.rid, null, printf('%d rows, M x G / DP', m.n // m.dp), printf('%d rows', r.n),
    printf('DP rank %d, mini-batch %d', r.dp, r.mini), null
from (select *, sum(n) over (partition by op, step_id, sub_step, epoch, mini) as covered from ranked) as r
join minis as m using (step_id, sub_step, epoch, mini)
where r.op = 'split' and m.dp > 0 and r.n * m.dp <> m.n and r.covered = m.n
union all
select rid, null, printf('the %d rows of the first rank of the replica', first_n), printf('other rows (%d)', n),
    printf('replica %d', dp), null
from replicas
