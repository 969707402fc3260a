-- code: KEY005
-- name: no row is lost undeclared
-- severity: error
-- says: What was submitted is trained on, left out for a recorded reason, or still pending: every drawn row is registered, every cleared prompt was chosen or left out, every output of a chosen group is sampled or left out, and every stage and dispatch takes the whole batch.
-- needs: key
-- fields:
-- examines: select sum(n) from events where entity in ('trajectory', 'prompt') and ((op = 'produce' and field in ('responses', 'key')) or (op = 'clear' and entity = 'prompt') or (stage = 'update_actor' and op = 'dispatch') or (queue and stage in ('old_log_prob', 'ref_log_prob', 'values', 'advantage', 'update_actor')))
-- subsumed_by: KEY002, KEY003, KEY008, BAT001, TOP002, QUE001, QUE004
-- source: open-instruct and OpenRLHF dropped what did not divide; NeMo-RL counted groups it never trained on
-- causes: Rows that did not divide were dropped, ragged lists were zipped, a group was evicted or a session's output forgotten without a reason, or a stage worked on a part of its batch.
-- reports: NVIDIA-NeMo/RL#2651, THUDM/slime#548, allenai/open-instruct#1271
-- faults: prompts_filtered_by_characters, remainder_of_the_deal, second_output_forgotten, undeclared_eviction
create or replace temp table batches as
-- the rows of a step's batches: sampled, and padded
select step_id, sum(n) as n, cast(sum(k) % 18446744073709551616 as ubigint) as k,
    sum(n) filter (op = 'produce') as real_n,
    cast(sum(k) filter (op = 'produce') % 18446744073709551616 as ubigint) as real_k
from events
where entity = 'trajectory' and field = 'key' and partition is distinct from 'val'
    and ((stage = 'sample' and op = 'produce') or (stage = 'balance' and op = 'pad'))
group by step_id
having count(*) filter (op = 'produce') > 0;
create or replace temp table takings as
-- what a stage reads or writes of a field, in all its rows of a step together
select rid, ord, step_id, stage, op, field, k,
    sum(n) over whole as n, cast(sum(k) over whole % 18446744073709551616 as ubigint) as whole_k,
    concat_ws('/', step_id, stage, op, field, span, consumer, producer) as taking
from events
where entity = 'trajectory' and k is not null and partition is distinct from 'val' and n > 0
    and ((queue and op in ('consume', 'produce')
            and stage in ('old_log_prob', 'ref_log_prob', 'values', 'advantage', 'update_actor'))
        or (stage = 'update_actor' and op = 'dispatch' and leads))
window whole as (partition by step_id, stage, op, field, span, consumer, producer);
create or replace temp table prompt_fates as
select coalesce(partition, '') = 'val' as val, run_id, step_id, op, k, rid, ord
from events
where entity = 'prompt' and k is not null and n > 0
    and ((op = 'clear' and stage is distinct from 'clear') or (op = 'filter' and field = 'status'));
create or replace temp table output_fates as
select partition is not distinct from 'val' as val, step_id,
    case when op = 'produce' and field = 'responses' then 'made' when op = 'filter' then 'left out' else 'sampled' end as fate,
    k, rid, ord
from events
where entity = 'trajectory' and k is not null and n > 0
    and ((op = 'produce' and field = 'responses' and stage = 'rollout') or (stage = 'sample' and op = 'filter')
        or (stage = 'sample' and op = 'produce' and field = 'key'));
with doubtful as (
    select t.taking, any_value(b.n) as n, any_value(t.n) as taken, max_by(t.rid, t.ord) as rid, t.step_id
    from takings as t join batches as b using (step_id)
    where not (t.n % b.n = 0 and t.whole_k = cast(b.k::hugeint * (t.n // b.n) % 18446744073709551616 as ubigint))
        and not (t.n % b.real_n = 0 and t.whole_k = cast(b.real_k::hugeint * (t.n // b.real_n) % 18446744073709551616 as ubigint))
    group by t.taking, t.step_id
),
batch_keys as (
    select e.step_id, id, count(*) as times
    from events as e join keyed using (k)
    where e.step_id in (select step_id from doubtful) and e.entity = 'trajectory' and e.field = 'key'
        and e.partition is distinct from 'val'
        and ((e.stage = 'sample' and e.op = 'produce') or (e.stage = 'balance' and e.op = 'pad'))
    group by all
),
doubted as materialized (select taking, step_id, k from takings where taking in (select taking from doubtful)),
-- else DuckDB counts the keys of every list before it asks which are wanted
doubted_keys as materialized (select k, id from keyed where k in (select k from doubted)),
taken_keys as (
    select taking, step_id, id, count(*) as times from doubted join doubted_keys using (k) group by all
),
partial as (
    select d.rid, coalesce(b.id, t.id) as id, coalesce(b.times, 0) as given, coalesce(t.times, 0) as taken
    from (select d.*, b.id, b.times from doubtful as d join batch_keys as b using (step_id)) as b
    full join taken_keys as t on t.taking = b.taking and t.id = b.id
    join doubtful as d on d.taking = coalesce(b.taking, t.taking)
    where coalesce(t.times, 0) % greatest(coalesce(b.times, 0), 1) <> 0 or coalesce(t.times, 0) = 0 or b.times is null
),
evicted as (
    select c.rid, id
    from (
        select step_id
        from prompt_fates
        group by step_id
        having cast(sum(k) filter (op = 'clear') % 18446744073709551616 as ubigint)
            is distinct from cast(sum(k) filter (op = 'filter') % 18446744073709551616 as ubigint)
    ) as d
    join prompt_fates as c on c.step_id = d.step_id and c.op = 'clear'
    join keyed using (k)
    where exists (select 1 from prompt_fates as f where f.op = 'filter' and f.run_id is not distinct from c.run_id)
        and id not in (select id from prompt_fates join keyed using (k) where op = 'filter')
),
unsure as (
    select step_id, val
    from output_fates
    group by all
    having cast(sum(k) filter (fate = 'made') % 18446744073709551616 as ubigint)
        is distinct from cast(sum(k) filter (fate <> 'made') % 18446744073709551616 as ubigint)
),
chosen as (
    select k.prompt_id as group_id, min(step_id) as step_id, max(rid) as rid
    from prompt_fates join keyed using (k) join keys as k using (id)
    where op = 'filter' and exists (select 1 from unsure)
    group by all
),
forgotten as (
    select coalesce(s.rid, c.rid) as rid, m.id
    from (select distinct id, step_id, val from output_fates join unsure using (step_id, val) join keyed using (k) where fate = 'made') as m
    join keys as t using (id)
    join chosen as c on c.group_id = t.group_id
    left join (select step_id, val, max(rid) as rid from output_fates where fate = 'sampled' group by all) as s
        on s.step_id = c.step_id and s.val = m.val
    where m.id not in (select id from output_fates join keyed using (k) where fate <> 'made')
),
drawn as (
    select coalesce(d.step_id, p.step_id) as step_id, coalesce(d.source_index, p.source_index) as source_index,
        d.rid as drawn_rid, coalesce(d.times, 0) as drawn, coalesce(p.times, 0) as registered
    from (
        select step_id, source_index, count(*) as times, max(rid) as rid
        from dataset_cells where field = 'index' and source_index is not null group by all
    ) as d
    left join (
        select step_id, source_index, count(distinct id) as times
        from group_cells where stage = 'prompt' and op = 'produce' and source_index is not null group by all
    ) as p using (step_id, source_index)
)
select rid, key, given || ' times, as in the batch' as expected, taken || ' times' as actual,
    'the step''s batch and what this stage takes of it' as detail, null as severity
from partial join keys using (id)
union all
select rid, key, 'chosen, or left out for a reason', 'cleared', 'a prompt group that no step declares', null
from evicted join keys using (id)
union all
select rid, key, 'sampled, or left out for a reason', 'neither', 'an output of a group that was sampled', null
from forgotten join keys using (id)
union all
select coalesce(p.rid, d.drawn_rid), source_index, drawn || ' uids, as often as it was drawn', registered || ' uids',
    printf('dataset row %d', source_index), null
from drawn as d
left join (select step_id, max(rid) as rid from group_cells where stage = 'prompt' and op = 'produce' group by all) as p using (step_id)
where registered < drawn and p.rid is not null
