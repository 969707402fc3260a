-- code: TOP001
-- name: actor data-parallel size
-- severity: error
-- says: The actor's DP is world/SP (FSDP, whatever fsdp_size), world/(TP x PP x CP) (Megatron, static CP), 1 (dynamic CP), and is what the backend reports; it never follows from the rollout's TP.
-- needs: topology
-- fields:
-- examines: select count(*) from events where topology is not null
-- subsumed_by:
-- source: S8
-- causes: DP was derived from fsdp_size or from the rollout's tensor parallelism instead of asked of the engine.
-- faults: dp_of_the_rollout, split_for_one_rank
with built as (
    select rid, topology as t, case
        when topology.dynamic_cp then 1
        when lower(topology.backend) like 'megatron%' then topology.world_size
            / (coalesce(topology.tp, 1) * coalesce(topology.pp, 1) * coalesce(topology.cp, 1))
        when lower(topology.backend) like 'fsdp%' then topology.world_size / coalesce(topology.sp, 1)
        else topology.world_size / (coalesce(topology.sp, 1) * coalesce(topology.tp, 1) * coalesce(topology.pp, 1)
            * coalesce(topology.cp, 1))
    end as dp
    from events
    where topology is not null and topology.reported_dp is not null and topology.world_size is not null
)
select rid, null as key, printf('DP %g', dp) as expected, printf('DP %d', t.reported_dp) as actual,
    printf('backend %s, world %d, sp %d, tp %d, pp %d, cp %d', t.backend, t.world_size, coalesce(t.sp, 1),
        coalesce(t.tp, 1), coalesce(t.pp, 1), coalesce(t.cp, 1))
    || case
        when t.reported_dp * t.rollout_tp = t.world_size then '; this is world / rollout TP'
        when t.reported_dp = t.fsdp_size then '; this is fsdp_size'
        else ''
    end as detail,
    null as severity
from built
where dp <> t.reported_dp
union all
select rid, null, printf('DP %d', topology.reported_dp), printf('DP %s', attrs['dp_size']),
    'the size the batch was split by, and the one the backend reports', null
from events
where topology.reported_dp is not null and try_cast(attrs['dp_size'] as bigint) <> topology.reported_dp
