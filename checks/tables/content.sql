-- Every trajectory with the content it was first written with.
create or replace table base as
with whose as (
    -- What was said of a key first: a later event that mixes up its tags does not make a real row padding.
    select id, min(step_id) as step_id, coalesce(min(said) % 2 = 1, false) as is_padding
    from (
        select id, step_id, cast(null as bigint) as said
        from (select distinct k, step_id from events where said) join keyed using (k)
        union all
        -- the event, and in its last bit what it said
        select id, step_id, 2 * ord + cast(is_padding as bigint) from key_cells where is_padding is not null
    )
    group by id
)
select
    id, whose.step_id, whose.is_padding, keys.group_id, keys.session_id, keys."index",
    prompts_rid, prompts_valid_length as prompt_len, prompts_fingerprint as prompts_fp,
    responses_rid, responses_valid_length as response_len, responses_fingerprint as responses_fp,
    responses_v as response_v, responses_c as response_c,
    response_mask_rid as mask_rid, response_mask_valid_length as mask_len, response_mask_mask_sum as mask_sum,
    coalesce(response_mask_mask_fingerprint, response_mask_fingerprint) as mask_fp,
    response_mask_fingerprint as mask_content, response_mask_sum as mask_added, response_mask_m as mask_m,
    response_mask_last_nnz as mask_last,
    loss_mask_rid as loss_rid, loss_mask_valid_length as loss_len, loss_mask_mask_sum as loss_sum,
    coalesce(loss_mask_mask_fingerprint, loss_mask_fingerprint) as loss_fp,
    input_ids_rid as ids_rid, input_ids_valid_length as ids_len, input_ids_fingerprint as ids_fp,
    input_ids_v as ids_v, input_ids_c as ids_c,
    attention_mask_rid as attention_rid, attention_mask_valid_length as attention_len,
    attention_mask_fingerprint as attention_fp, attention_mask_c as attention_c,
    position_ids_rid as positions_rid, position_ids_valid_length as positions_len,
    position_ids_fingerprint as positions_fp, position_ids_c as positions_c,
    uid_rid, uid_fingerprint as uid_fp,
    raw_prompt_rid, raw_prompt_fingerprint as raw_prompt_fp,
    reward_model_rid as truth_rid, reward_model_fingerprint as truth_fp, reward_model_c as truth_c,
    rm_scores_rid as reward_rid, rm_scores_sum as reward, rm_scores_fingerprint as reward_fp, rm_scores_c as reward_c,
    num_turns_sum as num_turns,
    coalesce(prompt_len_tag_rid, response_len_tag_rid, seq_len_tag_rid) as tags_rid,
    cast(prompt_len_tag_sum as bigint) as prompt_len_tag,
    cast(response_len_tag_sum as bigint) as response_len_tag,
    cast(seq_len_tag_sum as bigint) as seq_len_tag
from whose left join digest_first using (id) left join keys using (id);

create or replace table expected as
select
    k,
    count(*) as n,
    cast(sum(coalesce(loss_sum, mask_sum)) as bigint) as loss_tokens,
    count(*) filter (coalesce(loss_sum, mask_sum) > 0) as loss_rows,
    case when count(response_v) = count(*) then cast(sum(response_v) % 18446744073709551616 as ubigint) end as response_v,
    case when count(response_c) = count(*) then cast(sum(response_c) % 18446744073709551616 as ubigint) end as response_c,
    case when count(reward_c) = count(*) then cast(sum(reward_c) % 18446744073709551616 as ubigint) end as reward_c,
    case when count(truth_c) = count(*) then cast(sum(truth_c) % 18446744073709551616 as ubigint) end as truth_c,
    case when count(mask_m) = count(*) then cast(sum(mask_m) % 18446744073709551616 as ubigint) end as mask_m,
    case when count(ids_v) = count(*) then cast(sum(ids_v) % 18446744073709551616 as ubigint) end as ids_v,
    case when count(ids_c) = count(*) then cast(sum(ids_c) % 18446744073709551616 as ubigint) end as ids_c,
    case when count(attention_c) = count(*)
        then cast(sum(attention_c) % 18446744073709551616 as ubigint) end as attention_c,
    case when count(positions_c) = count(*)
        then cast(sum(positions_c) % 18446744073709551616 as ubigint) end as positions_c
from keyed left join base using (id)
where k in (select k from events where entity = 'trajectory')
group by k;
