-- code: REW004
-- name: scores teach something
-- severity: error
-- says: What a scorer could not judge has no score; groups whose sessions all have one score stay out where algorithm.filter_groups says so by the reward, and elsewhere their share per data_source is under a limit.
-- needs: key, sum
-- fields: rm_scores
-- examines: select coalesce((select sum(groups) from (select count(*) as groups from group_cells as g join events as e using (rid) where g.entity = 'prompt' and g.stage = 'prompt' and g.op = 'produce' and g.partition is distinct from 'val' group by e.run_id, g.data_source, e.op having count(*) >= said('reward.groups') or coalesce(setting(e.run_id, 'algorithm.filter_groups.enable'), 'false') = 'true')), 0) + (select count(*) from key_cells where stage = 'reward' and op = 'tag' and reason is not null)
-- subsumed_by: REW001, REW002, REW003, KEY002
-- source: DAPO's dynamic sampling (arXiv:2503.14476), verl's filter_groups
-- causes: A scorer's exception was swallowed and became a 0, the filter read a shaped or another batch's reward, or one data source is scored by a rule that never matches it.
create or replace temp table graded as
-- the groups a step trains on, with the scores of their sessions' last outputs
with chosen as (
    select g.step_id, g.id, max(g.rid) as rid
    from group_cells as g
    where g.entity = 'prompt' and g.stage = 'sample' and g.op = 'filter' and g.reason is null and g.status = 'finished'
        and g.partition is distinct from 'val'
    group by g.step_id, g.id
),
asked as (
    select step_id, id, any_value(data_source) as data_source
    from group_cells
    where entity = 'prompt' and stage = 'prompt' and op = 'produce'
    group by step_id, id
),
named as (
    select c.*, hash(k.key) as group_id, a.data_source
    from chosen as c join keys as k using (id) left join asked as a using (step_id, id)
),
finals as (
    select b.step_id, k.group_id, k.session_id, arg_max(b.reward, k."index") as reward
    from base as b join keys as k using (id)
    where not b.is_padding and isfinite(b.reward) and k.group_id is not null
    group by all
)
select n.rid, n.id, e.run_id, n.step_id, e.ord, n.data_source, count(*) as sessions, min(f.reward) as low, max(f.reward) as high
from named as n
join finals as f on f.step_id = n.step_id and f.group_id = n.group_id
join events as e on e.rid = n.rid
group by all
having count(*) > 1;
with filtering as (
    select run_id,
        coalesce(setting(run_id, 'algorithm.filter_groups.enable'), 'false') = 'true'
            and setting(run_id, 'algorithm.filter_groups.metric') in ('reward', 'seq_reward', 'seq_final_reward') as by_reward
    from (select distinct run_id from events)
),
failed as (
    select id, step_id, any_value(reason) as reason
    from key_cells
    where stage = 'reward' and op = 'tag' and reason is not null
    group by id, step_id
),
shares as (
    select run_id, data_source, count(*) as groups, count(*) filter (low = high) as flat,
        count(*) filter (low = 0 and high = 0) as zero, arg_max(rid, ord) as rid
    from graded
    where data_source is not null
    group by run_id, data_source
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
from graded as g
join filtering as f on f.run_id is not distinct from g.run_id
join keys as k using (id)
where f.by_reward and g.low = g.high
union all
select s.rid, s.data_source, printf('under %.0f %% of groups with one score', 100 * said('reward.flat')),
    printf('%d of %d groups', s.flat, s.groups), s.zero || ' of them all zero', 'warning'
from shares as s
join filtering as f on f.run_id is not distinct from s.run_id
where not f.by_reward and s.groups >= said('reward.groups') and s.flat >= said('reward.flat') * s.groups
