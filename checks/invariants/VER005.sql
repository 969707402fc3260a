-- code: VER005
-- name: staleness within its limit
-- severity: error
-- says: In an asynchronous run no trajectory trains that spans more model versions than the limit allows: the step that consumes it, less the oldest weights that generated it.
-- needs: key, min_global_steps
-- fields:
-- examines: select coalesce(sum(n), 0) from events where stage = 'sample' and op = 'produce' and field = 'key' and entity = 'trajectory' and partition is distinct from 'val' and not synchronous(run_id) and setting(run_id, 'trainer.v1.sampler.max_off_policy_threshold') is not null
-- subsumed_by: VER001
-- source: verl trainer.v1.sampler.max_off_policy_threshold
-- causes: The rule that drops compares with <= where < was meant, looks only now and then, or counts from zero again after a recovery.
-- reports: PrimeIntellect-ai/prime-rl#1901, areal-project/AReaL#1388
-- faults: stale_by_one_too_many, staleness_grows_after_recovery
with batches as (
    select rid, global_steps,
        try_cast(setting(run_id, 'trainer.v1.sampler.max_off_policy_threshold') as bigint) as allowed
    from events
    where stage = 'sample' and op = 'produce' and field = 'key' and entity = 'trajectory' and n > 0
        and partition is distinct from 'val' and not synchronous(run_id)
)
select rid, key, 'at most ' || allowed || ' versions' as expected,
    global_steps - min_global_steps || ' versions' as actual,
    'generated from version ' || min_global_steps || ' on, trained in step ' || global_steps as detail, null as severity
from batches join digest_key_cells using (rid) join keys using (id)
where global_steps - min_global_steps > allowed and not coalesce(is_padding, false)
