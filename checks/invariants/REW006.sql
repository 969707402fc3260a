-- code: REW006
-- name: every session is scored once
-- severity: error
-- says: Each session with rm_scores has a score event of its last output, and no output has two; one that was not scored is tagged, never 0; every column written beside the scores has one entry a key.
-- needs: key
-- fields: rm_scores
-- examines: select sum(n) from events where entity = 'trajectory' and field = 'rm_scores' and op = 'score'
-- subsumed_by: KEY001, REW003
-- source: the seeds' reward step: one score a session; TransferQueue drops a field that one row lacks
-- causes: A scorer's error or timeout became a score, a worker scored a row again after a retry, or the columns beside the scores were made from the keys of the first row.
-- reports: verl-project/verl#7151
-- faults: a_session_nobody_scored, extra_columns_of_the_first_rows, scored_again_after_a_timeout
create or replace temp table unscored as
select c.rid, c.step_id, c.id
from reward_cells as c join base as b using (id)
where c.field = 'rm_scores' and c.op = 'produce' and c.stage in ('rollout', 'reward') and c.entity = 'trajectory'
    and not b.is_padding
    and c.id not in (select id from reward_cells where field = 'rm_scores' and op = 'score')
    -- a step none of whose rows were scored where we look is scored elsewhere
    and c.step_id in (select step_id from events where field = 'rm_scores' and op = 'score' and entity = 'trajectory');
with asked as (
    select step_id, id, count(*) as times, min(rid) as rid
    from reward_cells
    where field = 'rm_scores' and op = 'score' and entity = 'trajectory'
    group by step_id, id
    having count(*) > 1
)
select rid, key, 'one score event' as expected, times || ' score events' as actual, null as detail, null as severity
from asked join keys using (id)
union all
select rid, key, 'a score event, or no score', 'a score nobody gave', 'rm_scores written for a session that was not scored', null
from unscored join keys as k using (id)
left join last_outputs as l on l.group_id = k.group_id and l.session_id = k.session_id
where k."index" = coalesce(l.last, 0)
    and id not in (select id from key_cells where stage = 'reward' and op = 'filter' and reason is not null)
union all
select c.rid, null, 'the keys of rm_scores', c.n || ' entries', c.field || ' beside rm_scores', null
from events as c
where c.stage = 'reward' and c.op = 'produce' and c.queue and c.entity = 'trajectory' and c.field <> 'rm_scores'
    and exists (from events as s where s.step_id = c.step_id and s.process = c.process and s.field = 'rm_scores'
        and s.stage = 'reward' and s.op = 'produce' and s.queue and s.entity = 'trajectory')
    -- a step may be scored in several batches
    and not exists (from events as s where s.step_id = c.step_id and s.process = c.process and s.field = 'rm_scores'
        and s.stage = 'reward' and s.op = 'produce' and s.queue and s.entity = 'trajectory' and s.k = c.k)
