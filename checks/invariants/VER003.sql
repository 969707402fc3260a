-- code: VER003
-- name: the engine generates with the last weights
-- severity: error
-- says: Between a change of the actor's weights and the next generation of a synchronous run there is a completed sync, whose caches begin anew before the engine wakes; one precedes the first generation, and the engine generates under the version and cache epoch of the last one. A prompt that both score after a sync has the actor's log-probs in the engine: mean difference at most 1e-3 in float32, 0.1 in fewer bits.
-- needs: weights, seq
-- fields: parameters
-- examines: select count(*) from events where (op = 'generate' and weights.version is not null) or (op = 'sync' and entity = 'param' and weights.phase = 'engine') or (op = 'compare' and field = 'probe_log_probs')
-- subsumed_by: VER001, VER002, VER007
-- source: the weight sync of the synchronous step; verl resets every cache of the engine with it
-- causes: The sync was skipped because the step looked unchanged, the engine woke with what it slept with, prefixes computed with older weights were still served, or a layer computes with a packed copy of its weight that the sync did not reach.
-- reports: NVIDIA-NeMo/RL#4018, NovaSky-AI/SkyRL#2246, PrimeIntellect-ai/prime-rl#1650, verl-project/verl#6522, vllm-project/vllm#17103
-- faults: cache_is_reset_before_the_weights_arrive, cache_survives_the_sync, engine_wakes_without_a_sync, nobody_resets_the_cache, one_engine_missed_the_sync, weights_are_synced_twice
create or replace temp table weight_runs as
with resumed as (
    select run_id, max(try_cast(attrs['global_steps'] as bigint)) as at
    from events where stage = 'init' and field = '_load_checkpoint' group by all
)
select coalesce(t.run_id, '') as run, t.global_steps,
    synchronous(t.run_id) as in_turn,
    coalesce(before = t.global_steps - 1 or (before = 0 and t.global_steps - 1 = coalesce(r.at, 0)), t.global_steps = 0)
        as whole
from (
    select run_id, global_steps, lag(global_steps) over (partition by run_id order by global_steps) as before
    from (select distinct run_id, global_steps from events)
) as t left join resumed as r on r.run_id is not distinct from t.run_id;
create or replace temp table weight_events as
with said as (
    select rid, ord, coalesce(run_id, '') as run, global_steps, op, stage, process, weights.phase as phase,
        weights.version as version, weights.cache_epoch as epoch,
        op = 'sync' and phase = 'engine' as loaded,
        op = 'optim_step' and not coalesce(optim.skipped, false) and coalesce(optim.lr > 0, true) as changed
    from events
    where op in ('sleep', 'wake', 'cache_reset', 'generate', 'optim_step') or (op = 'sync' and entity = 'param')
)
select s.*, r.in_turn, r.whole,
    max(s.ord) filter (loaded) over before as last_load,
    max(s.ord) filter (changed) over before as last_change,
    max(s.ord) filter (op = 'cache_reset') over before as last_reset,
    max(s.ord) filter (op = 'wake') over before as last_wake,
    max(s.ord) filter (op = 'sleep') over before as last_sleep,
    arg_max(version, s.ord) filter (loaded) over before as load_version,
    arg_max(epoch, s.ord) filter (loaded) over before as load_epoch
from said as s join weight_runs as r using (run, global_steps)
window before as (partition by s.run order by s.ord rows between unbounded preceding and 1 preceding);
with runs as (
    select run, bool_or(loaded) as syncs, bool_or(op = 'cache_reset') as resets from weight_events group by run
)
select rid, null as key, 'a sync since the actor''s last update' as expected,
    case when last_load is null then 'none in the run' else 'the last one came before it' end as actual,
    case when op = 'wake' then 'the engine wakes with older weights' else 'generated with older weights' end as detail,
    null as severity
from weight_events join runs using (run)
where syncs and in_turn and whole and op in ('wake', 'generate') and (op = 'wake' or version is not null)
    and (last_change > coalesce(last_load, 0) or (last_load is null and op = 'generate'))
union all
select rid, null, 'version ' || load_version, 'version ' || version,
    'of the last sync, and of the engine that generates', null
from weight_events
where op = 'generate' and whole and version <> load_version
union all
select rid, null, 'a cache epoch after ' || load_epoch, 'cache epoch ' || coalesce(epoch, load_epoch),
    case op
        when 'wake' then 'the engine wakes, and its caches are those of the older weights'
        when 'cache_reset' then 'the reset left the epoch as it was'
        else 'generated beside prefixes of older weights'
    end,
    null
from weight_events join runs using (run)
where whole and last_load is not null and (
    (op in ('wake', 'generate') and resets and coalesce(last_reset, 0) < last_load
        and (op = 'wake' or coalesce(last_wake, 0) < last_load))
    or (op = 'cache_reset' and coalesce(last_reset, 0) < last_load and epoch <= load_epoch)
    or (op = 'generate' and epoch <= load_epoch)
)
union all
select s.rid, null, 'one sync of version ' || s.version, 'another one',
    'nothing has changed since the last, and requests in flight may be cut short', 'warning'
from (
    select *, lag(version) over (partition by run, process order by ord) as last_version,
        lag(ord) over (partition by run, process order by ord) as last_sync
    from weight_events where op = 'sync' and phase = 'actor'
) as s
where s.version = s.last_version and coalesce(s.last_sleep, 0) < s.last_sync
    and coalesce(s.last_change, 0) < s.last_sync
union all
select p.rid, k.key, printf('within %g nats of the actor in the mean', p.band), coalesce(printf('%.6g', p.off), 'no number'),
    printf('%d tokens of a prompt scored after the sync, the greatest difference %.6g', cast(p.n_in as bigint),
        coalesce(p.absdiff_max, 'nan'::double)), null
from (
    select c.rid, c.id, c.n_in, c.absdiff_max, c.absdiff_sum / c.n_in as off, band(e.run_id) as band
    from pair_cells as c join events as e using (rid)
    where c.field = 'probe_log_probs' and c.n_in > 0
) as p join keys as k using (id)
where coalesce(not p.off <= p.band, true)
