-- code: LEN002
-- name: sequence is prompt and response
-- severity: error
-- says: len(input_ids) = prompt_len + response_len = seq_len, the length tags say the same, and position_ids are compatible: (seq) or (k, seq).
-- needs: key, valid_length
-- fields: input_ids, prompts, responses
-- examines: select sum(n) from events where entity = 'trajectory' and field in ('input_ids', 'position_ids', 'prompt_len', 'response_len', 'seq_len') and op <> 'compare'
-- subsumed_by: QUE003, LEN001
-- backs_up: LEN004: it needs no prefix fingerprints and no log-probs, only lengths and tags.
-- source: S2
-- causes: Prompt or response was truncated after input_ids were built, or the tags were written from other lengths than the tokens.
-- reports: THUDM/slime#143
-- faults: sequence_without_its_prompt, tags_without_the_end, truncated_input_ids
insert into suspects
select rid
from events left join expected using (k)
where entity = 'trajectory' and field = 'input_ids' and op <> 'compare' and v is not null and v is distinct from ids_v;
with known as (select b.*, prompt_len + response_len as seq_len, e.shape as positions_shape
    from base as b left join events as e on e.rid = b.positions_rid
)
select ids_rid as rid, key, printf('%d + %d = %d', prompt_len, response_len, seq_len) as expected,
    ids_len::varchar as actual, 'length of input_ids' as detail, null as severity
from known join keys using (id)
where ids_len <> seq_len
union all
select tags_rid, key,
    printf('prompt_len %d, response_len %d, seq_len %d', prompt_len, response_len, seq_len),
    printf('prompt_len %s, response_len %s, seq_len %s', coalesce(prompt_len_tag::varchar, '?'),
        coalesce(response_len_tag::varchar, '?'), coalesce(seq_len_tag::varchar, '?')),
    'length tags', null
from known join keys using (id)
where prompt_len_tag <> prompt_len or response_len_tag <> response_len or seq_len_tag <> seq_len
union all
select positions_rid, key, ids_len || ' or k x ' || ids_len, positions_len::varchar, 'length of position_ids', null
from known join keys using (id)
where positions_len <> ids_len
    and positions_len <> ids_len * case when len(positions_shape) = 3 then positions_shape[2] else 1 end
union all
select e.rid, e.key, b.seq_len::varchar, e.valid_length::varchar, 'length of input_ids, read later', null
from elements as e join keys as k using (run, key) join known as b on b.id = k.id
where e.valid_length <> b.ids_len
