-- code: LEN008
-- name: attention covers the row
-- severity: error
-- says: attention_mask is 0/1, one contiguous run of ones, whose sum is seq_len, wherever a batch is read for a forward pass and in the padded batch the model is given.
-- needs: key, valid_length, fingerprint
-- fields: attention_mask
-- examines: select sum(n) from events where entity = 'trajectory' and field = 'attention_mask' and op <> 'compare' and c is not null
-- subsumed_by: LEN002, QUE003
-- source: S2; verl takes sequence lengths from attention_mask
-- causes: The mask was rebuilt as ids != pad (a pad token inside the row is taken out), left out so that padding is attended to, or not cut with the ids.
-- reports: PrimeIntellect-ai/verifiers#382, huggingface/trl#2708, unslothai/unsloth#3176, verl-project/verl#1411, verl-project/verl#6345
-- faults: attention_by_token, attention_holds_ids, attention_not_truncated, attention_of_the_response, attention_to_padding
create or replace temp table attended as
select rid, k, c, nonzero <> tokens as beyond from events
where entity = 'trajectory' and field = 'attention_mask' and op <> 'compare' and c is not null;
insert into suspects
select rid from attended left join expected using (k) where c is distinct from attention_c or beyond;
with first as (
    select attention_rid as rid, key, attention_len, ids_len
    from base join keys using (id)
    where attention_rid in (select rid from attended)
        and (attention_fp <> repeated(1, attention_len) or attention_len <> ids_len)
),
later as (
    select e.rid, e.key, e.valid_length as attention_len, b.ids_len, e.nnz, e.length
    from elements as e join keys using (run, key) left join base as b using (id)
    where e.fingerprint <> repeated(1, e.valid_length) or e.valid_length <> b.ids_len or e.nnz <> e.valid_length
)
select rid, key, printf('%d ones', coalesce(ids_len, attention_len)) as expected,
    case when nnz > attention_len then printf('%d ones in a container of %d', nnz, length)
        when attention_len <> ids_len then printf('%d elements', attention_len)
        else printf('other than ones among %d elements', attention_len) end as actual,
    case when nnz > attention_len then 'padding is attended to' end as detail, null as severity
from (
    select *, null as nnz, null as length from first
    union all
    select rid, key, attention_len, ids_len, nnz, length from later
    where (rid, key) not in (select (rid, key) from first)
)
