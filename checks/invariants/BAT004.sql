-- code: BAT004
-- name: balancing balances
-- severity: warning
-- says: The work of the data-parallel ranks, estimated from the sequence lengths, is spread no more widely after the balance stage's reorder than before it, over the same padded rows.
-- needs: key, source_index
-- fields:
-- examines: select sum(n) from events where stage = 'balance' and op = 'reorder' and field = 'key' and coalesce(run_id, '') in (select coalesce(run_id, '') from events where topology.reported_dp > 1)
-- subsumed_by: KEY003
-- source: verl _balance_batch, calculate_workload; profile [balance]
-- causes: Rows were dealt in sorted order, were balanced by another length than the sequence's (without padding, the prompt alone), or the order was applied inverted.
-- reports: verl-project/verl#4697
-- faults: dealt_in_sorted_order
create or replace temp table balanced as
with ranks as (
    select run_id, max(topology.reported_dp) as dp from events where topology.reported_dp is not null group by run_id
),
orders as (
    select e.rid, e.n, r.dp
    from events as e join ranks as r on r.run_id is not distinct from e.run_id
    where e.stage = 'balance' and e.op = 'reorder' and e.field = 'key' and r.dp > 1 and e.n % r.dp = 0 and e.n > r.dp
        and coalesce(setting(e.run_id, 'trainer.balance_batch'), 'true') = 'true'
),
rows as (
    select c.rid, o.n // o.dp as share, c.i - 1 as now, c.source_index as was,
        said('balance.linear') * coalesce(b.seq_len_tag, b.ids_len)
            + said('balance.quadratic') * coalesce(b.seq_len_tag, b.ids_len)::double * coalesce(b.seq_len_tag, b.ids_len) as work
    from digest_key_cells as c
    join orders as o using (rid)
    left join base as b using (id)
),
loads as (
    select rid, 'now' as side, now // share as rank, sum(work) as load, count(work) = count(*) and count(was) = count(*) as known
    from rows group by all
    union all
    select rid, 'was', was // share, sum(work), count(work) = count(*) and count(was) = count(*)
    from rows group by all
)
select rid, max(load) filter (side = 'was') - min(load) filter (side = 'was') as before,
    max(load) filter (side = 'now') - min(load) filter (side = 'now') as after
from loads
group by rid
having bool_and(known);
select rid, null as key, printf('a spread of at most %.4g, as before', before) as expected, printf('%.4g', after) as actual,
    'greatest less least work of a data-parallel rank' as detail, null as severity
from balanced
where after > before
