-- code: VER002
-- name: the engine has the actor's weights
-- severity: error
-- says: A weight sync sends every name of the actor's state dict, tied tensors and buffers included, with the actor's own content; after it each tensor the engine serves with has the fingerprint of what was sent, as cast, those it keeps as one by composition of their parts.
-- needs: weights, fingerprint, seq
-- fields: parameters
-- examines: select coalesce(sum(e.n), 0) from events as e where e.op = 'sync' and e.entity = 'param' and e.weights.phase = 'engine' and e.c is not null and exists (select 1 from events as s where s.op = 'sync' and s.weights.phase = 'actor' and s.c is not null and s.run_id is not distinct from e.run_id and s.global_steps = e.global_steps)
-- subsumed_by:
-- source: vLLM for CPUs leaves a tied lm_head stale; verl's loaders skip registered buffers
-- causes: A name the loader does not know was skipped, a tied tensor has a copy of its own in the engine, or a transfer buffer was filled again before it was read.
-- reports: NVIDIA-NeMo/RL#2631, modelscope/ms-swift#7017, verl-project/verl#3821, verl-project/verl#5801, verl-project/verl#6688, verl-project/verl#7014, verl-project/verl#7453, vllm-project/vllm#29341
-- faults: adapter_is_taken_off_before_the_copy, bucket_is_filled_again, buffers_are_not_sent, deep_sleep_is_not_followed_by_a_load, deep_sleep_loses_the_base, engine_is_one_sync_behind, engine_unties_the_head, loader_skips_norms, one_layer_comes_from_its_neighbour, projections_change_places, weights_are_rounded_on_their_way
create or replace temp table param_sides as
select rid, ord, coalesce(run_id, '') as run, global_steps, stage, op, weights.phase as phase,
    weights.version as version,
    dtype, k, c, attrs
from events
where entity = 'param' and n > 0 and c is not null and weights.phase in ('actor', 'engine');
create or replace temp table sent as select * from param_sides where op = 'sync' and phase = 'actor';
-- What each engine was sent: the actor's last row before its own; several engines may follow one.
create or replace temp table synced as
select e.rid, e.ord, e.attrs, e.c, e.k, s.rid as sent_rid, s.c as sent_c, s.k as sent_k
from (select * from param_sides where op = 'sync' and phase = 'engine') as e
asof join sent as s on e.run = s.run and e.ord > s.ord;
-- What the actor itself has: its rows outside the sync.
create or replace temp table kept as
select s.rid, s.ord, s.k, s.c, a.rid as own_rid, a.k as own_k, a.c as own_c,
    a.version = s.version and a.dtype = s.dtype as alike, a.stage as own_stage
from sent as s
asof join (select * from param_sides where phase = 'actor' and op <> 'sync' and stage in ('init', 'checkpoint')) as a
    on s.run = a.run and s.ord > a.ord;
create or replace temp table param_names as
select p.rid, k.key as name, p.length, p.fingerprint
from param_cells as p join keys as k using (id)
where p.rid in (
    select unnest([rid, sent_rid]) from synced where c is distinct from sent_c
    union
    select unnest([rid, own_rid]) from kept where k is distinct from own_k or (alike and c is distinct from own_c)
    union
    select rid from sent
    union
    select rid from param_sides where stage = 'init' and op = 'produce'
);
create or replace temp table fused as
with recursive parts as (
    select s.rid, s.sent_rid, m.key as name, unnest(string_split(m.value, ',')) as part,
        generate_subscripts(string_split(m.value, ','), 1) as place
    from (select rid, sent_rid, unnest(map_entries(attrs)) as m from synced where c is distinct from sent_c) as s
    where exists (select 1 from param_names as n where n.rid = s.rid and n.name = m.key)
),
told as (
    select p.*, n.length, n.fingerprint
    from parts as p left join param_names as n on n.rid = p.sent_rid and n.name = trim(p.part)
),
composed as (
    select rid, name, place, length, fingerprint from told where place = 1
    union all
    select c.rid, c.name, t.place, c.length + t.length, compose(c.fingerprint, c.length, t.fingerprint)
    from composed as c join told as t on t.rid = c.rid and t.name = c.name and t.place = c.place + 1
)
select t.rid, t.name, list(trim(t.part) order by t.place) as parts,
    arg_max(c.length, c.place) as length, arg_max(c.fingerprint, c.place) as fingerprint,
    bool_and(t.length is not null) as whole
from told as t join composed as c on c.rid = t.rid and c.name = t.name and c.place = t.place
group by all;
with engine as (
    select s.rid, s.sent_rid, n.name, n.length, n.fingerprint
    from synced as s join param_names as n using (rid)
    where s.c is distinct from s.sent_c
),
actor as (
    select s.rid, n.name, n.length, n.fingerprint
    from synced as s join param_names as n on n.rid = s.sent_rid
    where s.c is distinct from s.sent_c
),
part_names as (select rid, unnest(parts) as name from fused),
received as (
    select e.rid, e.name, e.length, e.fingerprint,
        coalesce(a.length, f.length) as sent_length, coalesce(a.fingerprint, f.fingerprint) as sent_fp,
        case when a.name is not null then null else 'composed of ' || array_to_string(f.parts, ', ') end as how
    from engine as e
    left join actor as a on a.rid = e.rid and a.name = e.name
    left join fused as f on f.rid = e.rid and f.name = e.name and f.whole
)
select rid, name as key, printf('%x over %d elements', sent_fp, sent_length) as expected,
    printf('%x over %d elements', fingerprint, length) as actual,
    coalesce(how, 'not what was sent under this name') as detail, null as severity
from received
where sent_fp is not null and (fingerprint <> sent_fp or length <> sent_length)
union all
-- A tensor of the engine that nobody sent may be a tied one that was sent under its other name.
select r.rid, r.name, 'a tensor that was sent', 'never sent', 'the engine keeps what it had', null
from received as r
where r.sent_fp is null and not exists (
    select 1 from actor as a where a.rid = r.rid and a.length = r.length and a.fingerprint = r.fingerprint
)
union all
select a.rid, a.name, printf('%x over %d elements', a.fingerprint, a.length), 'not in the engine',
    'sent, and kept nowhere', null
from actor as a
where not exists (select 1 from engine as e where e.rid = a.rid and e.name = a.name)
    and not exists (select 1 from part_names as p where p.rid = a.rid and p.name = a.name)
    and not exists (
        select 1 from engine as e
        where e.rid = a.rid and e.length = a.length and e.fingerprint = a.fingerprint
    )
union all
select rid, name, case when own then 'sent' else 'no such name in the actor' end,
    case when own then 'left out' else 'sent' end, 'the names of the actor''s state dict', null
from (
    select k.rid, n.name, bool_or(n.rid = k.own_rid) as own, bool_or(n.rid = k.rid) as mine
    from kept as k join param_names as n on n.rid = k.own_rid or n.rid = k.rid
    where k.k is distinct from k.own_k
    group by all
)
where own <> mine
union all
select k.rid, own.name, printf('%x', own.fingerprint), printf('%x', mine.fingerprint),
    'the actor''s own, as ' || k.own_stage || ' shows it, and what was sent', null
from kept as k
join param_names as own on own.rid = k.own_rid
join param_names as mine on mine.rid = k.rid and mine.name = own.name
where k.alike and k.c is distinct from k.own_c and mine.fingerprint <> own.fingerprint
union all
-- Tied from the start, tied ever after.
select s.rid, head.name, printf('%x, as %s', body.fingerprint, body.name), printf('%x', head.fingerprint),
    'the two are one tensor', null
from sent as s
join param_names as head on head.rid = s.rid and head.name like '%lm_head.weight'
join param_names as body on body.rid = s.rid and body.name <> head.name and body.length = head.length
join param_sides as i on i.run = s.run and i.stage = 'init' and i.op = 'produce' and i.phase = 'actor'
join param_names as head0 on head0.rid = i.rid and head0.name = head.name
join param_names as body0 on body0.rid = i.rid and body0.name = body.name and body0.fingerprint = head0.fingerprint
where body.fingerprint <> head.fingerprint
