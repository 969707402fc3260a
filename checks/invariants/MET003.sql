-- code: MET003
-- name: a dump can be joined back
-- severity: error
-- says: Every line of a dump carries its trajectory key and is_padding, the key is one of the run, and the line says of it what the queue said.
-- needs: key
-- fields: dump
-- examines: select sum(coalesce(try_cast(attrs['lines'] as bigint), n)) from events where field = 'dump' and op = 'produce'
-- subsumed_by: QUE003, PAD001
-- source: verl dumps prompts and answers without the uid they belong to
-- causes: The dump was written from decoded text and scores alone, by position in the batch, or after the batch was reordered.
-- reports: verl-project/verl#6101
-- faults: dump_in_another_order, dump_without_keys
create or replace temp table dumps as
select rid, n, k, attrs, string_split(coalesce(attrs['columns'], ''), ',') as columns,
    coalesce(try_cast(attrs['lines'] as bigint), n) as lines
from events
where field = 'dump' and op = 'produce';
with lost as (
    select rid, lines, name
    from dumps, (values ('key'), ('uid'), ('is_padding')) as wanted(name)
    where lines > 0 and attrs['columns'] is not null and not list_contains(columns, name)
),
written as (
    select c.rid, k.key, c."sum" as score, c.is_padding, b.id is not null as known, b.reward,
        b.is_padding as pad
    from dump_cells as c join keys as k using (id) left join base as b using (id)
)
select rid, null as key, name || ' in every line' as expected, printf('%d lines without it', lines) as actual,
    'no line can be joined to its trajectory' as detail, null as severity
from lost
union all
select rid, null, printf('%d keys', lines), printf('%d keys', n), 'lines and keys of the dump', null
from dumps
where lines <> n and rid not in (select rid from lost)
union all
select rid, key, 'a trajectory of the run', 'a key nobody wrote', null, null
from written
where not known
union all
select rid, key, printf('score %.9g', reward), printf('score %.9g', score), 'the line of this key', null
from written
where abs(score - reward) > said('metrics.absolute') + said('metrics.relative') * abs(reward)
union all
select rid, key, 'is_padding ' || pad, 'is_padding ' || coalesce(is_padding::varchar, 'null'), 'the line of this key', null
from written
where known and is_padding is distinct from pad
