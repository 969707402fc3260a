-- Where each row of a complete step stands in the whole trace, in the order of events: by the process's own numbering,
-- by clock across processes. A trace judged in slices is placed once, as a whole.
create or replace temp table places as
select rid,
    dense_rank() over (order by run_id, global_steps) as step_id,
    dense_rank() over (order by run_id, coalesce(partition, '')) as scope,
    row_number() over (order by run_id, case when one then seq else time_ns end, process, seq) as ord
from digest_events, (select count(distinct process) <= 1 as one from digest_events)
where (coalesce(run_id, ''), global_steps) not in (select (run_id, step) from unseen);

create or replace temp table events as
select e.*, p.step_id, p.scope, p.ord
from digest_events as e join places as p using (rid)
order by p.ord;

-- A match without captures, then a split from the right: five times as fast as extracting the groups.
create or replace temp table keys as
select
    id, key, uid,
    case when uid is not null then hash(uid) end as group_id,
    case when uid is not null then try_cast(session as bigint) end as session_id,
    case when uid is not null then try_cast("index" as bigint) end as "index"
from (
    select *, case when whole then left(key, length(key) - length(session) - length("index") - 2) end as uid
    from (
        select id, key, split_part(key, '_', -2) as session, split_part(key, '_', -1) as "index",
            regexp_matches(key, '^(.+)_(0|[1-9][0-9]*)_(0|[1-9][0-9]*)$') as whole
        from (select distinct id, key from digest_names where key is not null)
    )
);

-- Every trajectory with the content it was first written with.
create or replace temp table base as
with whose as (
    -- What was said of a key first: a later event that mixes up its tags does not make a real row padding.
    select id, min(step_id) as step_id, coalesce(arg_min(is_padding, ord), false) as is_padding
    from (
        select id, step_id, cast(null as boolean) as is_padding, cast(null as bigint) as ord
        from (select distinct k, step_id from events where said) join keyed using (k)
        union all
        select id, step_id, is_padding, ord from key_cells where is_padding is not null
    )
    group by id
)
select
    id, whose.step_id, whose.is_padding,
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
    rm_scores_rid as reward_rid, rm_scores_sum as reward, rm_scores_fingerprint as reward_fp, rm_scores_c as reward_c,
    num_turns_sum as num_turns,
    coalesce(prompt_len_tag_rid, response_len_tag_rid, seq_len_tag_rid) as tags_rid,
    cast(prompt_len_tag_sum as bigint) as prompt_len_tag,
    cast(response_len_tag_sum as bigint) as response_len_tag,
    cast(seq_len_tag_sum as bigint) as seq_len_tag
from whose left join digest_first using (id);

create or replace temp table expected as
select
    k,
    count(*) as n,
    case when count(response_v) = count(*) then cast(sum(response_v) % 18446744073709551616 as ubigint) end as response_v,
    case when count(response_c) = count(*) then cast(sum(response_c) % 18446744073709551616 as ubigint) end as response_c,
    case when count(reward_c) = count(*) then cast(sum(reward_c) % 18446744073709551616 as ubigint) end as reward_c,
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

-- Whose tokens a trajectory is made of, as its loop said it: its turns taken together. Fingerprints are of the whole
-- sequence (``fp``) and of the mask its turns make, the prompt's part left out (``mask_fp``).
create or replace temp table ribbons as
select
    id, rid, any_value(step_id) as step_id, any_value(ord) as ord,
    sum(valid_length) as seq_len,
    coalesce(sum(valid_length) filter (role = 'prompt'), 0) as prompt_len,
    coalesce(sum(valid_length) filter (role = 'policy'), 0) as policy_len,
    count(*) filter (role = 'policy') as policy_turns,
    max("start" + valid_length) filter (role = 'policy') as policy_end,
    sum(generated) filter (role = 'policy') as generated,
    count(generated) filter (role = 'policy') as counted,
    coalesce(sum(greatest(truncated_from - valid_length, 0)) filter (role = 'policy'), 0)
        + coalesce(sum(trimmed) filter (role = 'policy'), 0) as cut,
    count(trimmed) as trims,
    cast(sum(compose(0, "start", fingerprint)) % 18446744073709551616 as ubigint) as fp,
    cast(coalesce(sum(compose(0, "start", repeated(case when role = 'policy' then 1 else 0 end, valid_length)))
        filter (role <> 'prompt'), 0) % 18446744073709551616 as ubigint) as mask_fp
from turn_cells
group by id, rid;

-- Every request of the engine, with the session it was for; of engines that number theirs otherwise, with none.
create or replace temp table asked as
select
    r.rid, r.step_id, r.ord, keys.group_id, keys.session_id, keys."index" as number,
    p.rid as prompt_rid, p.valid_length as prompt_len, p.fingerprint as prompt_fp,
    r.valid_length as answer_len, r.fingerprint as answer_fp, r.generated, r.finish_reason, r.truncated_from
from request_cells as r
join keys using (id)
left join request_cells as p on p.id = r.id and p.step_id = r.step_id and p.field = 'prompts'
where r.field = 'responses';

-- Where to point when a key itself is at fault: where its list was first written, else where it was first seen. (A
-- scorer inside the agent loop sees a key before the queue does, but does not make it.)
create or replace temp table firsts as
select k, entity, partition, min(late) as late, arg_min(ord, late) as ord, arg_min(rid, late) as rid
from (
    select k, entity, partition, rid, ord, ord + case when op in ('produce', 'tag') then 0 else 1000000000000 end as late
    from events
    where k is not null and entity in ('trajectory', 'prompt')
)
group by k, entity, partition;
