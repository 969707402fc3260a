-- code: REW004
-- name: scores teach something
-- severity: error
-- says: What a scorer could not judge has no score; groups whose sessions all have one score stay out where algorithm.filter_groups says so by the reward, and elsewhere their share per data_source is under a limit.
-- needs: key, sum
-- fields: rm_scores
-- examines: select coalesce((select sum(groups) from (select count(*) as groups from graded as g join (select distinct step_id, run_id from events) as e using (step_id) group by e.run_id, g.data_source having count(*) >= said('reward.groups') or (setting(e.run_id, 'algorithm.filter_groups.enable') = 'true' and setting(e.run_id, 'algorithm.filter_groups.metric') = 'reward'))), 0) + (select count(*) from key_cells where stage = 'reward' and op = 'filter' and reason is not null)
-- subsumed_by: REW001, REW002, REW003, KEY002
-- source: DAPO's dynamic sampling (arXiv:2503.14476), verl's filter_groups
-- causes: A scorer's exception was swallowed and became a 0, the filter read a shaped or another batch's reward, or one data source is scored by a rule that never matches it.
-- reports: NVIDIA-NeMo/RL#2431, OpenRLHF/OpenRLHF@e333e64a, huggingface/trl#5775
-- faults: an_error_of_the_scorer_is_a_zero, the_filter_reads_a_shaped_reward, the_filter_takes_the_container_for_the_group
create or replace temp table flat_groups as
select * from graded where low = high;
with steps as (
    select distinct step_id, run_id from events
),
filtering as (
    select run_id,
        coalesce(setting(run_id, 'algorithm.filter_groups.enable'), 'false') = 'true'
            -- any other metric is a number of the scorer's own beside the score
            and setting(run_id, 'algorithm.filter_groups.metric') = 'reward' as by_reward
    from (select distinct run_id from events)
),
failed as (
    select id, step_id, reason from key_cells where stage = 'reward' and op = 'filter' and reason is not null
),
shares as (
    select s.run_id, g.data_source, count(*) as groups, count(*) filter (low = high) as flat,
        count(*) filter (low = 0 and high = 0) as zero, arg_max(g.rid, g.ord) as rid
    from graded as g join steps as s using (step_id)
    where g.data_source in (select data_source from flat_groups)
    group by s.run_id, g.data_source
)
select c.rid, k.key, 'no score' as expected, printf('score %.9g', c."sum") as actual,
    'the scorer could not judge it: ' || f.reason as detail, null as severity
from failed as f
join reward_cells as c on c.step_id = f.step_id and c.id = f.id
join keys as k on k.id = f.id
where c.field = 'rm_scores' and c.op = 'produce'
union all
select g.rid, k.key, 'filtered out', printf('trained on, every session with score %.9g', g.low),
    g.sessions || ' sessions; algorithm.filter_groups is on', null
from flat_groups as g
join steps as s using (step_id)
join filtering as f on f.run_id is not distinct from s.run_id
join keys as k using (id)
where f.by_reward
union all
select s.rid, s.data_source, printf('under %.0f %% of groups with one score', 100 * said('reward.flat')),
    printf('%d of %d groups', s.flat, s.groups), s.zero || ' of them all zero', 'warning'
from shares as s
join filtering as f on f.run_id is not distinct from s.run_id
where not f.by_reward and s.groups >= said('reward.groups') and s.flat >= said('reward.flat') * s.groups
