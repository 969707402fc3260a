-- code: BAT001
-- name: mini-batches divide by the data-parallel size
-- severity: error
-- says: The global mini-batch (M x G) divides by the data-parallel size the backend reports, and its parts are equal.
-- needs: n
-- fields:
-- examines: select sum(n) from events where stage = 'update_actor' and ((op = 'split' and micro_batch is null) or op = 'dispatch')
-- subsumed_by: TOP001
-- source: S7
-- causes: ppo_mini_batch_size x rollout.n is not a multiple of the actor's DP, or the batch was not padded to a multiple before it was split.
with minis as (
    select *,
        coalesce(try_cast(attrs['global_batch_size'] as bigint), n) as whole,
        coalesce(topology.reported_dp, try_cast(attrs['dp_size'] as bigint)) as dp,
        max(n) over (partition by run_id, global_steps, process, coord.dp) as largest
    from events
    where stage = 'update_actor' and op = 'split' and micro_batch is null and mini_batch is not null
),
ranks as (
    -- a step may be trained on in several batches, each dealt to the ranks by itself
    select *,
        max(n) over (partition by run_id, global_steps, process, mini_batch, ppo_epoch, attrs['sub_step']) as largest
    from events
    where stage = 'update_actor' and op = 'dispatch'
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
    printf('dispatch to DP rank %d', coord.dp), null
from ranks
where n <> largest
