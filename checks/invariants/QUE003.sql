-- code: QUE003
-- name: what is read was written
-- severity: error
-- says: Content read from the queue is the content last written for that field and key, length and fingerprint.
-- needs: key, seq, valid_length, fingerprint
-- fields:
-- examines: select sum(n) from events where queue and op = 'consume' and c is not null
-- subsumed_by: QUE001
-- source: S11
-- causes: Rows came back under another key (an index applied twice, a slot re-used), or somebody wrote the field in between without saying so.
-- reports: Ascend/TransferQueue#127, huggingface/trl#6804, verl-project/verl#2962
-- faults: freed_slots_still_answer, one_object_stands_for_two_rows, rows_in_slot_order, serialising_casts_the_batch, tokens_replayed_without_their_advantages
create or replace temp table written as
select rid, ord, run_id, coalesce(partition, '') as partition, global_steps, field, k, c
from events
where queue and op = 'produce' and n > 0 and c is not null and k is not null and entity = 'trajectory';
create or replace temp table reading as
with pairs as (
    select r.rid, r.k, r.c, w.rid as w, w.ord as w_ord, w.k as w_k, w.c as w_c
    from events as r
    join written as w
        on r.run_id is not distinct from w.run_id and coalesce(r.partition, '') = w.partition and r.field = w.field
        and r.global_steps = w.global_steps and w.ord < r.ord
    where r.queue and r.op = 'consume' and r.n > 0 and r.c is not null and r.entity = 'trajectory'
)
select rid,
    (max_by(w_k, w_ord) = any_value(k) and max_by(w_c, w_ord) = any_value(c))
    or (
        cast(sum(w_k) % 18446744073709551616 as ubigint) = any_value(k)
        and cast(sum(w_c) % 18446744073709551616 as ubigint) = any_value(c)
    ) as same
from pairs
group by rid;
create or replace temp table doubtful as
with unsettled as (
    select e.rid, e.field, e.run_id, coalesce(e.partition, '') as partition, e.global_steps, e.ord, e.k, e.c,
        r.rid is not null as here
    from events as e left join reading as r using (rid)
    where e.queue and e.op = 'consume' and e.n > 0 and e.c is not null and e.entity = 'trajectory'
        and not coalesce(r.same, false)
        and (coalesce(e.run_id, ''), e.field) in (select (coalesce(run_id, ''), field) from written)
),
-- Who reads some rows of a batch reads what was first said of them, if all that was written since says the same.
sides as (
    select distinct u.rid, w.rid as side, w.field, w.k, w.c
    from unsettled as u
    join written as w
        on u.run_id is not distinct from w.run_id and u.partition = w.partition and u.field = w.field
        and u.global_steps = w.global_steps and w.ord < u.ord
    union all
    select rid, rid, field, k, c from unsettled where here
),
first_said as (
    unpivot (
        select k, case when count(columns('^(.+)_c$')) = count(*)
            then cast(sum(columns('^(.+)_c$')) % 18446744073709551616 as ubigint) end as "\1"
        from keyed left join digest_first using (id)
        where k in (select k from sides)
        group by k
    )
    on columns(* exclude k) into name field value c
),
settled as (
    select s.rid
    from sides as s left join first_said as f on f.k = s.k and f.field = s.field
    group by s.rid
    having bool_and(coalesce(s.c = f.c, false))
)
select rid, field, run_id, partition, global_steps, ord, here
from unsettled
where rid not in (select rid from settled);
insert into suspects
select rid from doubtful
union
select w.rid
from doubtful as d
join written as w
    on d.run_id is not distinct from w.run_id and d.partition = w.partition and d.field = w.field and w.ord < d.ord
    and (w.global_steps = d.global_steps or not d.here);
with got as (
    select e.*, d.ord, d.partition as part from elements as e join doubtful as d using (rid)
),
put as (
    select e.*, w.ord, w.partition as part from elements as e join written as w using (rid)
),
matched as (
    select g.rid, g.key, g.i, any_value(g.valid_length) as valid_length, any_value(g.fingerprint) as fingerprint,
        max_by(p.valid_length, p.ord) as was_length, max_by(p.fingerprint, p.ord) as was_fp, max(p.ord) as was,
        max_by(p.stage, p.ord) as was_stage
    from got as g
    left join put as p
        on p.key = g.key and p.field = g.field and p.part = g.part and p.run_id is not distinct from g.run_id
        and p.ord < g.ord
    group by g.rid, g.key, g.i
)
select rid, key,
    case when was is null then 'a put of this field' else printf('length %d, fingerprint %x', was_length, was_fp) end
        as expected,
    printf('length %d, fingerprint %x', valid_length, fingerprint) as actual,
    case when was is null then 'read but never written' else 'last written in ' || was_stage end as detail,
    null as severity
from matched
where was is null or valid_length <> was_length or fingerprint <> was_fp
