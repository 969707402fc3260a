-- code: REW003
-- name: the scorer reads the final response
-- severity: error
-- says: What the scorer reads is the response of the session's final output: its length, its tokens, and no other output's.
-- needs: key, valid_length, fingerprint
-- fields: rm_scores, responses
-- examines: select sum(events.n) from events join expected using (k) where entity = 'trajectory' and stage = 'reward' and field = 'responses' and op in ('consume', 'pad') and c is not null and response_c is not null
-- subsumed_by: KEY001, KEY002, LEN001, LEN003, QUE003, TOK004
-- source: the seeds' session score by the last output; verl 0.9.1 scores sessions of several outputs on an empty string
-- causes: The scorer was handed the prompt, one turn, an earlier output or nothing at all; or a response cut or decoded for another row.
insert into suspects
select rid
from events join expected using (k)
where entity = 'trajectory' and stage = 'reward' and field = 'responses' and op in ('consume', 'pad') and c is not null
    and c <> response_c;
with reading as (
    select step_id, id, min(rid) as rid
    from (select distinct step_id, k, rid from events where entity = 'trajectory' and stage = 'reward' and op = 'score')
    join keyed using (k)
    group by step_id, id
),
sessions as (
    select r.step_id, k.group_id, k.session_id, max(k."index") as last, arg_max(r.rid, k."index") as rid,
        arg_max(r.id, k."index") as id
    from reading as r join keys as k using (id)
    where k.group_id is not null
    group by all
),
outputs as (
    select b.step_id, k.group_id, k.session_id, max(k."index") as last
    from base as b join keys as k using (id)
    where not b.is_padding and b.responses_rid is not null and k."index" > 0
    group by all
)
select e.rid, e.key, printf('%d tokens, fingerprint %x', b.response_len, b.responses_fp) as expected,
    printf('%d tokens, fingerprint %x', e.valid_length, e.fingerprint) as actual,
    case when e.valid_length = 0 then 'the scorer was given nothing' else 'the response as written, and as the scorer read it' end as detail,
    null as severity
from elements as e
join keys as k using (key)
join base as b using (id)
where e.stage = 'reward' and (e.fingerprint <> b.responses_fp or e.valid_length <> b.response_len)
union all
select s.rid, k.key, 'output ' || o.last || ' scored', 'output ' || s.last || ' scored', 'the last output of a session is its result', null
from sessions as s
join outputs as o on o.step_id = s.step_id and o.group_id = s.group_id and o.session_id = s.session_id
join keys as k on k.id = s.id
where s.last <> o.last
