-- code: KEY003
-- name: a reorder moves rows, nothing else
-- severity: error
-- says: A reorder keeps the multiset of its batch's keys and their version tags, and in a dense container all fields follow one permutation.
-- needs: key, seq
-- fields:
-- examines: select sum(n) from events where op = 'reorder'
-- subsumed_by: KEY002
-- backs_up: MET001: that sees a wrong number later; this one says which rows or tags the reorder left behind.
-- source: S6
-- causes: Fields were permuted apart (a permutation applied to one container and not to the other), or rows were dropped, repeated or taken from another batch of the step by an index that is not a permutation.
-- reports: Ascend/TransferQueue@7f70edd, OpenRLHF/OpenRLHF#1299
-- faults: padding_shares_its_tag, tags_left_behind, zip_of_ragged_shards
create or replace temp table hand_overs as
with moves as materialized (
    -- a validation in the same step hands over rows that nobody reorders
    select rid, ord, step_id, op, n, k
    from events
    where entity = 'trajectory' and field = 'key' and partition is distinct from 'val'
        and (op = 'reorder' or (stage = 'sample' and op = 'produce') or (stage = 'balance' and op = 'pad'))
),
numbered as (
    -- a step may train on several batches, each reordered by itself: rows sampled after a reorder are the next one
    select *, cast(sum(opens) over (order by step_id, ord rows unbounded preceding) as bigint) as batch
    from (
        select *, cast(last is null or (last = 'reorder' and op = 'produce') as integer) as opens
        from (select *, lag(op) over (partition by step_id order by ord) as last from moves)
    )
    where step_id in (select step_id from moves where op = 'reorder')
)
select *,
    -- rows of the batch handed over before this event, and how often it had been reordered
    coalesce(sum(n) filter (op <> 'reorder') over before, 0) as already,
    count(*) filter (op = 'reorder') over before as turn
from numbered
window before as (partition by batch order by ord rows between unbounded preceding and 1 preceding);
create or replace temp table after_reorder as
select rid, step_id, batch, turn, h.n, already, id, i - 1 as position, is_padding, global_steps_tag, min_global_steps,
    max_global_steps, source_index
from digest_key_cells join hand_overs as h using (rid)
where op = 'reorder';
create or replace temp table before_reorder as
select step_id, batch, id, is_padding, global_steps_tag, min_global_steps, max_global_steps,
    already + i - 1 as position
from digest_key_cells join hand_overs using (rid)
where op <> 'reorder';
insert into suspects
select rid from events where op = 'reorder' and field <> 'key' and entity = 'trajectory';
with handed as (
    select batch, cast(sum(k) filter (op <> 'reorder') % 18446744073709551616 as ubigint) as handed_k,
        coalesce(min(rid) filter (op = 'reorder'), min(rid)) as rid, bool_or(op = 'reorder') as reordered
    from hand_overs
    group by batch
),
doubtful as (
    -- the signature of the keys handed over says whether a batch has to be counted key by key
    select batch from handed where not reordered
    union
    select batch from hand_overs join handed using (batch) where op = 'reorder' and k is distinct from handed_k
),
counted as (
    select batch, id, sum(b) as before, sum(a) as after
    from (
        select step_id, batch, id, 1 as b, 0 as a from before_reorder where batch in (select batch from doubtful)
        union all
        select step_id, batch, id, 0, 1 from after_reorder where batch in (select batch from doubtful)
    )
    where step_id in (select step_id from before_reorder)
    group by batch, id
    having sum(a) % greatest(sum(b), 1) <> 0 or sum(b) = 0 or sum(a) = 0
),
moved as materialized (
    select a.*, b.position as handed_at, b.global_steps_tag as g, b.min_global_steps as lo, b.max_global_steps as hi,
        b.is_padding as pad
    from after_reorder as a
    join before_reorder as b
        on a.batch = b.batch and a.id = b.id
),
places as (
    -- the first reorder of a batch counts from what was handed over, a later one from the one before it
    select rid, id, source_index, handed_at as place from moved where turn = 0 and n = already
    union all
    select a.rid, a.id, a.source_index, b.position
    from after_reorder as a join after_reorder as b
        on a.batch = b.batch and a.turn = b.turn + 1 and a.n = b.n and a.id = b.id
    where a.turn > 0
)
select e.rid, k.key, before || ' times' as expected, after || ' times' as actual,
    'before and after the reorder' as detail, null as severity
from counted join handed as e using (batch) join keys as k using (id)
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
select rid, k.key, 'source_index ' || place, 'source_index ' || source_index, 'position before the reorder', null
from places join keys as k using (id)
where source_index <> place
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
