-- code: KEY003
-- name: a reorder moves rows, nothing else
-- severity: error
-- says: A reorder keeps the multiset of keys and their version tags, and in a dense container all fields follow one permutation.
-- needs: key
-- fields:
-- examines: select sum(n) from events where op = 'reorder'
-- subsumed_by: KEY002
-- source: S6
-- causes: Fields were permuted apart (a permutation applied to one container and not to the other), or rows were dropped and repeated by an index that is not a permutation.
create or replace temp table after_reorder as
select rid, ord, step_id, id, i, is_padding, global_steps_tag, min_global_steps, max_global_steps, source_index
from key_cells
where op = 'reorder' and field = 'key';
create or replace temp table before_reorder as
with handed as (
    select rid, coalesce(sum(n) over (partition by step_id order by ord rows between unbounded preceding and 1 preceding), 0)
        as already
    from events
    where entity = 'trajectory' and field = 'key'
        and ((stage = 'sample' and op = 'produce') or (stage = 'balance' and op = 'pad'))
        -- a validation in the same step hands over rows that nobody reorders
        and partition is distinct from 'val'
        and step_id in (select step_id from events where op = 'reorder' and field = 'key')
)
select c.step_id, c.id, c.is_padding, c.global_steps_tag, c.min_global_steps, c.max_global_steps,
    already + c.i - 1 as position
from key_cells as c join handed using (rid);
insert into suspects
select rid from events where op = 'reorder' and field <> 'key' and entity = 'trajectory';
with handed as (
    select step_id, cast(sum(k) % 18446744073709551616 as ubigint) as k
    from events
    where entity = 'trajectory' and field = 'key'
        and ((stage = 'sample' and op = 'produce') or (stage = 'balance' and op = 'pad'))
        and partition is distinct from 'val'
    group by step_id
),
doubtful as (
    -- the signature of the keys handed over says whether a step has to be counted key by key
    select e.step_id
    from events as e left join handed as h using (step_id)
    where e.op = 'reorder' and e.field = 'key' and e.k is distinct from h.k
),
counted as (
    select step_id, id, sum(b) as before, sum(a) as after
    from (
        select step_id, id, 1 as b, 0 as a from before_reorder where step_id in (select step_id from doubtful)
        union all
        select step_id, id, 0, 1 from after_reorder where step_id in (select step_id from doubtful)
    )
    where step_id in (select step_id from before_reorder)
    group by step_id, id
    having sum(a) % greatest(sum(b), 1) <> 0 or sum(b) = 0 or sum(a) = 0
),
event as (
    select step_id, min(rid) as rid, count(distinct rid) as reorders from after_reorder group by step_id
),
moved as materialized (
    select a.*, b.position, b.global_steps_tag as g, b.min_global_steps as lo, b.max_global_steps as hi,
        b.is_padding as pad
    from after_reorder as a
    join before_reorder as b
        on a.step_id = b.step_id and a.id = b.id
)
select e.rid, k.key, before || ' times' as expected, after || ' times' as actual,
    'before and after the reorder' as detail, null as severity
from counted join event as e using (step_id) join keys as k using (id)
union all
select rid, k.key,
    printf('global_steps %s, versions %s..%s%s', coalesce(g::varchar, '?'), coalesce(lo::varchar, '?'),
        coalesce(hi::varchar, '?'), case when pad then ', padding' else '' end),
    printf('global_steps %s, versions %s..%s%s', coalesce(global_steps_tag::varchar, '?'),
        coalesce(min_global_steps::varchar, '?'), coalesce(max_global_steps::varchar, '?'),
        case when is_padding then ', padding' else '' end),
    'tags before and after the reorder', null
from moved join keys as k using (id)
where g <> global_steps_tag or lo <> min_global_steps or hi <> max_global_steps or pad <> is_padding
union all
select rid, k.key, 'source_index ' || position, 'source_index ' || source_index, 'position before the reorder', null
from moved join keys as k using (id)
where source_index <> position
    and step_id in (select step_id from event where reorders = 1)
union all
select a.rid, a.key, 'position ' || first.i || ', as ' || first.field, 'position ' || a.i,
    'two fields of one reorder follow two permutations', null
from elements as a
join (
    select x.run_id, x.global_steps, x.stage, x.process, x.key, min_by(x.i, x.seq) as i, min_by(x.field, x.seq) as field
    from elements as x group by all
) as first
    on a.run_id is not distinct from first.run_id and a.global_steps = first.global_steps and a.stage = first.stage and a.process = first.process
    and a.key = first.key
where a.i <> first.i
