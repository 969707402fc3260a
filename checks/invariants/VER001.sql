-- code: VER001
-- name: version tags are true
-- severity: error
-- says: The version tags of a real trajectory are there, and min <= max <= the version the rollout was last given <= the step that trains on it; in a synchronous run both are the version of the last completed sync, global_steps - 1, and step g publishes version g, and saves it where trainer.save_freq has a checkpoint of it.
-- needs: key, global_steps_tag, min_global_steps, max_global_steps
-- fields:
-- examines: select count(*) from key_cells where entity = 'trajectory' and op in ('tag', 'produce') and global_steps_tag is not null and not coalesce(is_padding, false)
-- subsumed_by: KEY001, QUE001, VER003
-- source: S6; verl tags a trajectory with the oldest and newest weights that wrote it
-- causes: The version was read when the session ended instead of when its tokens were drawn, counted at the wrong event, or lost on the way from the engine; or a setting that has the weights saved is read nowhere.
-- reports: NVIDIA-NeMo/RL#1035, PrimeIntellect-ai/prime-rl#1764, rllm-org/rllm#621, rllm-org/rllm#622
-- faults: checkpoint_is_never_saved, newest_version_is_stamped_at_the_end, one_group_keeps_an_old_stamp, rows_are_asked_for_by_another_step, version_counts_double, version_is_counted_late, versions_are_lost_on_the_way
create or replace temp table version_runs as
select coalesce(run_id, '') as run, synchronous(run_id) as in_turn
from (select distinct run_id from events);
-- A step whose predecessor is not in the trace may have been given weights nobody sees here.
create or replace temp table version_steps as
with resumed as (
    select coalesce(run_id, '') as run, max(try_cast(attrs['global_steps'] as bigint)) as at
    from events where stage = 'init' and field = '_load_checkpoint' group by all
),
told as (
    select run, global_steps, lag(global_steps) over (partition by run order by global_steps) as before
    from (select distinct coalesce(run_id, '') as run, global_steps from events)
)
select t.run, t.global_steps, r.at as resumed,
    t.before is null or t.before = t.global_steps - 1 or (t.before = 0 and t.global_steps - 1 = coalesce(r.at, 0))
        as whole
from told as t left join resumed as r using (run);
create or replace temp table published as
select rid, ord, coalesce(run_id, '') as run, global_steps, weights.phase as phase, weights.version as version
from events
where op = 'sync' and entity = 'param' and weights.version is not null;
create or replace temp table tagged as
with marks as (
    select rid, ord, coalesce(run_id, '') as run, global_steps, partition is not distinct from 'val' as validation,
        stage = 'sample' as trains
    from events
    where entity = 'trajectory' and n > 0 and (op = 'tag' or (op = 'produce' and field = 'key'))
),
placed as (
    select m.*, p.version from marks as m asof left join published as p on m.run = p.run and m.ord > p.ord
)
select p.*, r.in_turn, s.whole,
    -- what a resumed run does before its first step belongs to the step it loaded
    case when p.global_steps > 0 then p.global_steps else coalesce(s.resumed, 0) end as step,
    case
        when not r.in_turn then null
        when not p.validation then p.global_steps - 1
        when s.whole then p.version
    end as due
from placed as p join version_runs as r using (run) join version_steps as s using (run, global_steps);
-- A trace that says from which checkpoint the run began has the checkpoints it saved. They come before the sync.
create or replace temp table unsaved as
with saving as (
    select run_id, try_cast(setting(run_id, 'trainer.save_freq') as bigint) as every,
        try_cast(setting(run_id, 'trainer.total_training_steps') as bigint) as total
    from (select distinct run_id from events where stage = 'init' and field = '_load_checkpoint')
)
select e.run_id, e.global_steps, any_value(s.every) as every, min_by(e.rid, e.ord) as rid
from events as e join saving as s on s.run_id is not distinct from e.run_id
where e.stage = 'weight_sync' and e.op = 'sync' and e.global_steps > 0 and s.every > 0
    and (e.global_steps % s.every = 0 or e.global_steps = s.total)
    and not exists (
        select 1 from events as c
        where c.stage = 'checkpoint' and c.run_id is not distinct from e.run_id and c.global_steps = e.global_steps
    )
group by e.run_id, e.global_steps;
with wrong as (
    select c.rid, c.id, c.min_global_steps as low, c.max_global_steps as high, c.global_steps_tag as asked,
        t.due, t.version, t.step, t.in_turn,
        case
            when c.min_global_steps is null or c.max_global_steps is null then 'a version tag is missing'
            when c.min_global_steps > c.max_global_steps then 'min is after max'
            when c.min_global_steps <> t.due or c.max_global_steps <> t.due
                then 'not the version the rollout generated with'
            when t.in_turn and c.global_steps_tag <> t.step then 'another step asked for it'
            when t.whole and c.max_global_steps > t.version then 'a version nobody has published'
            when c.max_global_steps > t.step then 'newer than the step'
        end as why
    from key_cells as c join tagged as t using (rid)
    where not coalesce(c.is_padding, false) and c.global_steps_tag is not null
),
-- What drew the tokens of a request must lie between the tags of its trajectory; where one version drew all of a
-- step's, the rule above has said it.
several as (
    select coalesce(run_id, '') as run, global_steps
    from events where op = 'generate' and weights.version is not null
    group by all having count(distinct weights.version) > 1
),
drawn as (
    select r.id, min(e.weights.version) as low, max(e.weights.version) as high
    from request_cells as r join events as e using (rid)
    where e.weights.version is not null and r.field = 'responses' and coalesce(e.run_id, '') in (select run from several)
    group by r.id
)
select rid, key,
    case
        when why = 'another step asked for it' then 'step ' || step
        when due is not null then printf('versions %d..%d', due, due)
        when why = 'min is after max' then 'min <= max'
        else 'versions up to ' || coalesce(version, step)
    end as expected,
    case
        when why = 'another step asked for it' then 'step ' || asked
        else 'versions ' || coalesce(cast(low as varchar), 'none') || '..' || coalesce(cast(high as varchar), 'none')
    end as actual,
    why as detail, null as severity
from wrong join keys using (id)
where why is not null
union all
select c.rid, k.key, printf('versions from %d to %d', d.low, d.high),
    printf('versions %d..%d', c.min_global_steps, c.max_global_steps), 'other weights drew its tokens', null
from drawn as d
join key_cells as c on c.id = d.id and c.op = 'tag'
join keys as k on k.id = c.id
where (c.min_global_steps > d.low or c.max_global_steps < d.high)
    and c.rid in (select rid from tagged where not in_turn)
union all
select p.rid, null, 'version ' || case when p.global_steps > 0 then p.global_steps else s.resumed end,
    'version ' || p.version, 'published by the ' || p.phase, null
from published as p join version_runs as r using (run) join version_steps as s using (run, global_steps)
where r.in_turn and p.version <> case when p.global_steps > 0 then p.global_steps else s.resumed end
union all
select rid, null, printf('a checkpoint of version %d', global_steps), 'none', printf('trainer.save_freq %d', every), null
from unsaved
