-- code: QUE007
-- name: a broken group is not trained as whole
-- severity: error
-- says: A group with a session that failed, or that left no output, ends as failure and is handed to training as such; finished means that every session it declares has written.
-- needs: status, expected
-- fields: responses
-- examines: select count(*) from group_cells where entity = 'prompt' and status in ('finished', 'failure')
-- subsumed_by: QUE005, KEY001
-- source: verl's agent loop gathers exceptions; a group fails when one session did
-- causes: Exceptions of sessions were gathered and not looked at, or the status was written before the last session had settled.
-- faults: errors_are_gathered_and_forgotten, failed_group_is_handed_on_as_whole
create or replace temp table endings as
select c.rid, c.id, c.status, c.reason, c.op, c.stage, e.ord, e.step_id, coalesce(e.run_id, '') as run,
    k.prompt_id as group_id, k.key
from group_cells as c join events as e using (rid) join keys as k using (id)
where c.entity = 'prompt' and c.status in ('finished', 'failure');
create or replace temp table declared_sessions as
select id, max(expected) as expected from prompt_groups group by id;
create or replace temp table written_sessions as
select group_id, count(session_id) as sessions
from (
    select distinct group_id, session_id from base
    where not is_padding and group_id is not null and responses_rid is not null
)
group by group_id;
-- A key that names no group (KEY001) may be of any: its step is not held against one.
create or replace temp table nameless_rows as
select distinct step_id from base where not is_padding and group_id is null and responses_rid is not null;
select e.rid, e.key, d.expected || ' sessions written' as expected,
    coalesce(w.sessions, 0) || ' sessions written' as actual, 'the group is tagged finished' as detail, null as severity
from endings as e
join declared_sessions as d using (id)
left join written_sessions as w on w.group_id = e.group_id
where e.op = 'tag' and e.status = 'finished' and e.reason is null and coalesce(w.sessions, 0) < d.expected
    and e.step_id not in (select step_id from nameless_rows)
    and e.run in (select coalesce(run_id, '') from events where field = 'responses' and op = 'produce')
union all
select s.rid, s.key, 'failure', s.status, 'the group failed, and is handed to training as one that did not', null
from endings as s
join endings as t on t.id = s.id and t.op = 'tag' and t.ord < s.ord
where s.op = 'filter' and s.stage = 'sample' and t.status = 'failure' and s.status = 'finished'
