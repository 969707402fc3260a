-- code: QUE005
-- name: a group's status runs its course
-- severity: error
-- says: The status of a prompt goes pending, running, finished or failure and no other way; the sample takes groups that have ended, and in a synchronous run data.train_batch_size of them, what is left out being declared; prompt keys hold tags and no fields.
-- needs: status, seq
-- fields:
-- examines: select count(*) from group_cells where entity = 'prompt' and status is not null
-- subsumed_by: QUE001, KEY005
-- source: verl V1 ReplayBuffer; the status tag of a prompt key
-- causes: A group was tagged twice, by a retry or by two workers, ended before its sessions had, was sampled while they ran, or was dropped without a word.
-- faults: ended_group_runs_again, group_ends_without_having_run, prompts_lie_in_the_queue
create or replace temp table status_moves as
select *, lag(status) over life as last_status, row_number() over life as turn,
    max(status is null) over (partition by run, part, id) as born
from (
    select c.rid, c.id, c.i, c.status, c.op, c.stage, e.ord, e.attrs, coalesce(e.run_id, '') as run,
        case when e.partition is not distinct from 'val' then 'val' else 'train' end as part
    from group_cells as c join events as e using (rid)
    where c.entity = 'prompt' and (c.status is not null or c.op = 'produce')
)
window life as (partition by run, part, id order by ord, i);
create or replace temp table chosen_groups as
select max_by(rid, ord) as rid, run_id, global_steps, sum(n) as n
from events
where stage = 'sample' and op = 'filter' and entity = 'prompt' and field = 'status'
    and partition is distinct from 'val' and coalesce(attrs['left_out'], '') = ''
group by run_id, global_steps;
select m.rid, k.key,
    case
        when m.op = 'filter' then 'finished or failure'
        when m.last_status is null then 'pending first'
        when m.last_status = 'pending' then 'running'
        when m.last_status = 'running' then 'finished or failure'
        else 'nothing after ' || m.last_status
    end as expected,
    case when m.op = 'filter' then coalesce(m.last_status, m.status) else m.status end as actual,
    case when m.op = 'filter' then 'the batch is made of it' else 'tagged' end as detail,
    null as severity
from status_moves as m join keys as k using (id)
where m.status is not null and case
    when m.op = 'filter' then m.status not in ('finished', 'failure') or m.last_status not in ('finished', 'failure')
    when m.last_status is null then m.status <> 'pending' and m.turn > 1 and m.born
    when m.last_status = 'pending' then m.status <> 'running'
    when m.last_status = 'running' then m.status not in ('finished', 'failure')
    else true
end
union all
select c.rid, null, s.batch || ' groups', c.n || ' groups', 'taken for one step', null
from chosen_groups as c
join (
    select run_id, try_cast(setting(run_id, 'data.train_batch_size') as bigint) as batch,
        synchronous(run_id) as in_turn
    from (select distinct run_id from chosen_groups)
) as s on s.run_id is not distinct from c.run_id
where s.in_turn and c.n <> s.batch
union all
select rid, null, 'tags', 'fields: ' || field, 'a prompt key of the queue holds no values', null
from events
where entity = 'prompt' and op = 'produce' and queue and n > 0 and field <> 'uid'
