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
create or replace temp table asked as
select step_id, id, count(*) as times, min(rid) as rid
from (select rid, step_id, id from reward_cells where field = 'rm_scores' and op = 'score' and entity = 'trajectory')
group by step_id, id;
create or replace temp table answered as
with given as (
    select c.rid, c.step_id, c.partition, c.id, k.group_id, k.session_id, k."index"
    from reward_cells as c join keys as k using (id) join base as b using (id)
    where c.field = 'rm_scores' and c.op = 'produce' and c.stage in ('rollout', 'reward') and c.entity = 'trajectory'
        and not b.is_padding and k.group_id is not null
        -- a step none of whose rows were scored where we look is scored elsewhere
        and c.step_id in (select step_id from asked)
),
scored as (select distinct a.step_id, k.group_id, k.session_id from asked as a join keys as k using (id))
select g.step_id, arg_max(g.rid, g."index") as rid, arg_max(g.id, g."index") as id
from given as g
left join scored as s on s.step_id = g.step_id and s.group_id = g.group_id and s.session_id = g.session_id
where s.group_id is null
group by g.step_id, g.group_id, g.session_id;
select rid, key, 'one score event' as expected, times || ' score events' as actual, null as detail, null as severity
from asked join keys using (id)
where times > 1
union all
select rid, key, 'a score event, or no score', 'a score nobody gave', 'rm_scores written for a session that was not scored', null
from answered join keys using (id)
where id not in (select id from key_cells where stage = 'reward' and op = 'tag' and reason is not null)
union all
select c.rid, null, 'an entry for each of ' || s.n || ' keys', c.n || ' entries', 'beside rm_scores, in one write', null
from events as s
join events as c
    on c.step_id = s.step_id and c.process = s.process and c.stage = s.stage and c.op = s.op and c.queue
where s.stage = 'reward' and s.op = 'produce' and s.queue and s.field = 'rm_scores' and s.entity = 'trajectory'
    and c.entity = 'trajectory' and c.k is distinct from s.k
