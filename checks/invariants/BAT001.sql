-- code: BAT001
-- name: mini-batches divide by the data-parallel size
-- severity: error
-- says: The global mini-batch (M x G) divides by the data-parallel size the backend reports, and every data-parallel rank is dealt an equal part.
-- needs: n
-- fields:
-- examines: select sum(n) from events where stage = 'update_actor' and ((op = 'split' and micro_batch is null) or op = 'dispatch')
-- subsumed_by: TOP001
-- backs_up: TOP002: it needs no dispatch, and says of the plan what TOP002 says of the deal.
-- source: S7
-- causes: ppo_mini_batch_size x rollout.n is not a multiple of the actor's DP, the batch was not padded to a multiple before it was split, or a rank was left out when it was dealt.
-- faults: ceil_for_the_first_ranks, mini_batch_in_trajectories
with minis as materialized (
    select rid, run_id, global_steps, process, mini_batch, coord.dp as rank, n, attrs['sub_step'] as sub_step,
        coalesce(try_cast(attrs['global_batch_size'] as bigint), n) as whole,
        coalesce(topology.reported_dp, try_cast(attrs['dp_size'] as bigint)) as dp,
        max(n) over (partition by run_id, global_steps, process, coord.dp) as largest
    from events
    where stage = 'update_actor' and op = 'split' and micro_batch is null and mini_batch is not null
),
ranks as materialized (
    -- a step may be trained on in several batches, each dealt to the ranks by itself
    select rid, run_id, global_steps, process, coord.dp as rank, n, attrs['sub_step'] as sub_step,
        max(n) over batch as largest, min(rid) over batch as batch
    from events
    where stage = 'update_actor' and op = 'dispatch'
    window batch as (partition by run_id, global_steps, process, mini_batch, ppo_epoch, attrs['sub_step'])
),
dealt as (
    select batch as rid, any_value(run_id) as run_id, any_value(global_steps) as global_steps,
        any_value(process) as process, any_value(sub_step) as sub_step, list_sort(list(distinct rank)) as named
    from ranks
    group by batch
    having count(rank) = count(*)
),
planned as (
    -- who splits whole mini-batches deals to all ranks; a rank that says its own share says nothing of the others
    select run_id, global_steps, process, sub_step, max(dp) as dp
    from minis
    where rank is null and dp > 0
    group by run_id, global_steps, process, sub_step
)
select rid, null as key, printf('a multiple of DP %d', dp) as expected, printf('%d rows', whole) as actual,
    printf('mini-batch %d', mini_batch) as detail, null as severity
from minis
where dp > 0 and whole % dp <> 0
union all
select rid, null, printf('%d rows, as the others', largest), printf('%d rows', n), printf('mini-batch %d', mini_batch), null
from minis
where n <> largest
union all
select rid, null, printf('%d rows, or %d on each of %d ranks', whole, whole // dp, dp), printf('%d rows', n),
    printf('mini-batch %d', mini_batch), null
from minis
where dp > 0 and n = largest and n <> whole and n * dp <> whole
union all
select rid, null, printf('%d rows, as the other ranks', largest), printf('%d rows', n),
    printf('dispatch to DP rank %d', rank), null
from ranks
where n <> largest
union all
select d.rid, null, printf('a part for each of %d ranks', dp), printf('%d parts', len(named)),
    'dispatch to DP ranks ' || array_to_string(named, ', '), null
from dealt as d join planned as p
    on d.run_id is not distinct from p.run_id and d.global_steps = p.global_steps
    and d.process is not distinct from p.process and d.sub_step is not distinct from p.sub_step
where len(named) <> dp
