-- code: VER007
-- name: nothing is generated asleep
-- severity: error
-- says: No generation is admitted between sleep and the end of the sync that wakes the engine.
-- needs: seq
-- fields:
-- examines: select count(*) from events as e where op = 'generate' and n > 0 and exists (select 1 from events as s where s.op in ('sleep', 'wake') and s.run_id is not distinct from e.run_id)
-- subsumed_by:
-- source: verl's rollout sleeps from sample to the weight sync
-- causes: Only one kind of client was paused, a request was retried while the weights were replaced, or the engine slept before its sessions had ended.
-- reports: areal-project/AReaL#1618
-- faults: engine_sleeps_before_its_sessions_end, retry_meets_half_the_weights
with told as (
    select rid, op, n,
        max(ord) filter (op = 'sleep') over before as slept, max(ord) filter (op = 'wake') over before as woke
    from events
    where op in ('sleep', 'wake') or (op = 'generate' and n > 0)
    window before as (partition by run_id order by ord rows between unbounded preceding and 1 preceding)
)
select rid, null as key, 'an engine that is awake' as expected, 'generated asleep' as actual,
    n || ' requests between sleep and wake' as detail, null as severity
from told
where op = 'generate' and slept > coalesce(woke, 0)
