-- code: LEN003
-- name: padding and back loses nothing
-- severity: error
-- says: Nested to padded to nested keeps every valid length and every fingerprint.
-- needs: key, valid_length, fingerprint, mini_batch
-- fields:
-- examines: select sum(n) from events where op in ('pad', 'unpad') and field <> 'key' and entity = 'trajectory'
-- subsumed_by: LEN006, LEN008
-- backs_up: REW002: it holds for every field that is padded, with or without a score, and names the padding itself.
-- source: S9
-- causes: Padded to a width shorter than the longest row, un-padded by a mask or by a width that is not the row's own length, or padded on the other side.
-- faults: advantages_written_to_the_next_row, forward_padded_left, padding_loses_the_last_value, written_back_by_position
create or replace temp table converted as
select r.rid, arg_max(p.rid, p.ord) as was
from events as r
join events as p
    on r.run_id is not distinct from p.run_id and r.global_steps = p.global_steps and r.stage = p.stage
    and r.field = p.field and r.process = p.process and p.ord < r.ord
where r.entity = 'trajectory' and r.field <> 'key' and r.n > 0
    and (
        -- a mini-batch is padded out of the whole batch: its rows are judged one by one (LEN006, LEN008, TOK001)
        (r.op = 'pad' and r.mini_batch is null and p.op in ('consume', 'produce', 'unpad', 'forward') and p.layout is distinct from 'dense')
        or (r.op = 'unpad' and p.op in ('forward', 'pad', 'score'))
        or (r.op = 'produce' and p.op = 'unpad')
    )
group by r.rid;
insert into suspects
select unnest([r.rid, p.rid])
from converted
join events as r using (rid)
join events as p on p.rid = converted.was
where r.k is distinct from p.k or coalesce(r.c, r.v) is distinct from coalesce(p.c, p.v);
select a.rid, a.key,
    case when b.key is null then 'no such row before' else printf('valid length %d, fingerprint %x', b.valid_length, b.fingerprint) end as expected,
    printf('valid length %d, fingerprint %x', a.valid_length, a.fingerprint) as actual,
    case when a.valid_length = b.valid_length then 'same length, other content' end as detail, null as severity
from elements as a
join converted as c using (rid)
left join elements as b on b.rid = c.was and b.key = a.key
where (b.key is null or a.valid_length <> b.valid_length or a.fingerprint <> b.fingerprint)
union all
select a.rid, b.key, 'kept', 'lost', 'the row is gone after the conversion', null
from elements as b
join converted as c on c.was = b.rid
join events as a on a.rid = c.rid
left join elements as there on there.rid = c.rid and there.key = b.key
where there.key is null and a.op <> 'produce'
