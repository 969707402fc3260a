-- code: QUE001
-- name: put, get, clear, in that order
-- severity: error
-- says: Per key the first put precedes the first get, and every put, tag and get precedes the clear; a write to a cleared key is a ghost.
-- needs: key, seq
-- fields:
-- examines: select sum(n) from events where op in ('tag', 'clear') or (queue and op in ('produce', 'consume'))
-- subsumed_by:
-- source: S11; TransferQueue re-creates a cleared key on write
-- causes: An agent loop still running wrote back to a group that was already sampled and cleared, or a stage read before the rollout had written.
-- reports: rllm-org/rllm#600
-- faults: cleared_key_is_tagged, late_writer
create or replace temp table acts as
select e.scope, k.id, min(first_put) as first_put, min(first_get) as first_get, min(cleared) as cleared,
    max(last_use) as last_use
from (
    select scope, k,
        min(ord) filter (op in ('produce', 'tag')) as first_put,
        min(ord) filter (op = 'consume') as first_get,
        min(ord) filter (op = 'clear') as cleared,
        max(ord) filter (op <> 'clear') as last_use
    from events
    where k is not null and n > 0 and (op in ('tag', 'clear') or (queue and op in ('produce', 'consume')))
    group by scope, k
) as e
join keyed as k using (k)
group by e.scope, k.id;
with late as (select * from acts where last_use > cleared),
early as (select * from acts where first_get < first_put),
uses as (
    select distinct e.rid, e.ord, e.op, e.field, e.scope, k.id
    from events as e join keyed as k using (k)
    where k.id in (select id from late union select id from early) and e.n > 0
        and (e.op = 'tag' or (e.queue and e.op in ('produce', 'consume')))
)
select u.rid, k.key, printf('nothing after its clear (%s, seq %d)', c.stage, c.seq) as expected,
    u.op || ' of ' || u.field as actual,
    case when u.op = 'consume' then 'a cleared key is read' else 'a ghost: the write re-creates the key' end as detail,
    null as severity
from late
join uses as u
    on u.id = late.id and u.scope = late.scope and u.ord > late.cleared
join events as c on c.ord = late.cleared
join keys as k on k.id = late.id
union all
select u.rid, k.key, 'a put before the first get', 'got before it was put', u.field, null
from early
join uses as u on u.id = early.id and u.ord = early.first_get
join keys as k on k.id = early.id
