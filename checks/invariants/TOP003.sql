-- code: TOP003
-- name: rollout topology stands apart
-- severity: error
-- says: The rollout's topology is recorded apart from the actor's.
-- needs: topology
-- fields:
-- examines: select count(*) from events where topology is not null
-- subsumed_by: TOP001
-- source: S8
-- causes: One set of parallel sizes was recorded for both engines, so that the rollout's TP stands where the actor's belongs.
-- faults: one_topology_for_both
select rid, null as key, 'rollout_tp beside the actor''s sizes' as expected, 'not recorded' as actual,
    printf('backend %s', topology.backend) as detail, null as severity
from events
where topology is not null and topology.rollout_tp is null
    and not exists (
        select 1 from events as other
        where other.topology.rollout_tp is not null and other.run_id is not distinct from events.run_id
    )
union all
select rid, null, 'no tensor parallelism of the actor', printf('tp %d', topology.tp),
    printf('backend %s has none; %d is the rollout''s', topology.backend, topology.rollout_tp), null
from events
where lower(topology.backend) like 'fsdp%' and topology.tp > 1 and topology.tp = topology.rollout_tp
