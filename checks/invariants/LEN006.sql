-- code: LEN006
-- name: positions count the tokens
-- severity: error
-- says: The text channel of position_ids over a row's valid tokens is 0, 1, ..., seq_len - 1, whatever the padding side, packing or shard layout.
-- needs: key, valid_length, fingerprint
-- fields: position_ids
-- examines: select sum(n) from events where entity = 'trajectory' and field = 'position_ids' and op <> 'compare' and c is not null and coalesce(len(shape), 0) < 3
-- subsumed_by: LEN002, QUE003, QUE009
-- source: verl postprocesses position_ids apart from input_ids; positions of k axes are judged by LEN002, by shape
-- causes: Positions were counted over the padded width, or padded on another side than the tokens, so that the model sees every token of the row moved.
-- reports: OpenRLHF/OpenRLHF#217, huggingface/trl#6800, unslothai/unsloth-zoo#840, verl-project/verl#4243
-- faults: positions_count_padding, positions_from_one, positions_restart_in_the_update, response_positions_padded_left
create or replace temp table counted as
select rid, k, c from events
where entity = 'trajectory' and field = 'position_ids' and op <> 'compare' and c is not null and coalesce(len(shape), 0) < 3;
insert into suspects
select rid from counted left join expected using (k) where c is distinct from positions_c;
with first as (
    select positions_rid as rid, key, positions_len, positions_fp, ids_len
    from base join keys using (id)
    where positions_rid in (select rid from counted)
        and (positions_fp <> counting(positions_len) or positions_len <> ids_len)
),
later as (
    select e.rid, e.key, e.valid_length as positions_len, e.fingerprint as positions_fp, b.ids_len,
        e."first" as begins, e."last" as ends
    from elements as e join keys using (run, key) left join base as b using (id)
    where e.fingerprint <> counting(e.valid_length) or e.valid_length <> b.ids_len
)
select rid, key, printf('0 to %d', coalesce(ids_len, positions_len) - 1) as expected,
    case when positions_len <> ids_len then printf('%d positions', positions_len)
        when begins is not null then printf('from %g, the container ends on %g', begins, ends)
        else 'other numbers' end as actual,
    'position_ids over the valid tokens' as detail, null as severity
from (
    select *, null as begins, null as ends from first
    union all
    select rid, key, positions_len, positions_fp, ids_len, begins, ends from later
    where (rid, key) not in (select (rid, key) from first)
)
