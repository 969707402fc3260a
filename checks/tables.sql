-- Rows of complete steps, in the order of events: by the process's own numbering, by clock across processes.
create or replace temp table events as
select
    * exclude (k, v, c, m),
    k, v, c, m,
    dense_rank() over (order by run_id, global_steps) as step_id,
    row_number() over (order by run_id, case when one then seq else time_ns end, process, seq) as ord
from digest_events, (select count(distinct process) <= 1 as one from digest_events)
where global_steps not in (select step from unseen);

create or replace temp table keys as
select
    id, key,
    nullif(part.uid, '') as uid,
    case when part.uid <> '' then hash(part.uid) end as group_id,
    try_cast(part.session_id as bigint) as session_id,
    try_cast(part."index" as bigint) as "index"
from (
    select id, key,
        regexp_extract(key, '^(.+)_(0|[1-9][0-9]*)_(0|[1-9][0-9]*)$', ['uid', 'session_id', 'index']) as part
    from (select distinct id, key from digest_names where key is not null)
);

create or replace temp view content_cells as
select c.*, e.step_id, e.stage, e.op, e.field, e.partition, e.ord
from digest_content_cells as c join events as e using (rid);

create or replace temp table key_cells as
select c.*, e.step_id, e.stage, e.op, e.field, e.partition, e.ord
from digest_key_cells as c join events as e using (rid);

create or replace temp view group_cells as
select c.*, e.step_id, e.stage, e.op, e.field, e.entity, e.ord
from digest_group_cells as c join events as e using (rid);

-- The content of a trajectory as it was first written: by the rollout, by the reward after it, or as a padding row. A
-- field nobody wrote in those stages is taken where it was produced.
create or replace temp table said as
with rows_of as (
    select rid, field, op, step_id,
        op = 'tag' or early or not bool_or(early and op = 'produce') over (partition by step_id, field) as first
    from (
        select *, stage in ('rollout', 'reward', 'balance') as early
        from events
        where entity = 'trajectory' and op in ('produce', 'tag')
    )
)
select c.id, c.rid, c.valid_length, c.mask_sum, c.fingerprint, coalesce(c.mask_fingerprint, c.fingerprint) as mask_fp,
    c."sum" as total, c.ve, c.ce, c.me, r.step_id, r.op || ' ' || r.field as what
from digest_content_cells as c join rows_of as r using (rid)
where r.first;

create or replace temp table base as
with whose as (
    -- What was said of a key first: a later event that mixes up its tags does not make a real row padding.
    select id, min(step_id) as step_id, coalesce(arg_min(is_padding, ord), false) as is_padding
    from (
        select id, step_id, cast(null as boolean) as is_padding, cast(null as bigint) as ord from said
        union all
        select id, step_id, is_padding, ord from key_cells where is_padding is not null
    )
    group by id
),
prompts as (
    select id, any_value(rid) as rid, any_value(valid_length) as len, any_value(fingerprint) as fp
    from said where what = 'produce prompts' group by id
),
responses as (
    select id, any_value(rid) as rid, any_value(valid_length) as len, any_value(fingerprint) as fp, any_value(ve) as v
    from said where what = 'produce responses' group by id
),
masks as (
    select id, any_value(rid) as rid, any_value(valid_length) as len, any_value(mask_sum) as total,
        any_value(mask_fp) as fp, any_value(fingerprint) as content, any_value(total) as added, any_value(me) as m
    from said where what = 'produce response_mask' group by id
),
losses as (
    select id, any_value(rid) as rid, any_value(valid_length) as len, any_value(mask_sum) as total,
        any_value(mask_fp) as fp
    from said where what = 'produce loss_mask' group by id
),
ids as (
    select id, any_value(rid) as rid, any_value(valid_length) as len, any_value(fingerprint) as fp, any_value(ve) as v,
        any_value(ce) as c
    from said where what = 'produce input_ids' group by id
),
positions as (
    select id, any_value(rid) as rid, any_value(valid_length) as len
    from said where what = 'produce position_ids' group by id
),
uids as (
    select id, any_value(rid) as rid, any_value(fingerprint) as fp from said where what = 'produce uid' group by id
),
rewards as (
    select id, any_value(rid) as rid, any_value(total) as total from said where what = 'produce rm_scores' group by id
),
turns as (select id, any_value(total) as total from said where what = 'produce num_turns' group by id),
tags as (
    select id, any_value(rid) as rid,
        cast(max(total) filter (what = 'tag prompt_len') as bigint) as prompt_len,
        cast(max(total) filter (what = 'tag response_len') as bigint) as response_len,
        cast(max(total) filter (what = 'tag seq_len') as bigint) as seq_len
    from said where what in ('tag prompt_len', 'tag response_len', 'tag seq_len') group by id
)
select
    whose.id, whose.step_id, whose.is_padding,
    prompts.rid as prompts_rid, prompts.len as prompt_len, prompts.fp as prompts_fp,
    responses.rid as responses_rid, responses.len as response_len, responses.fp as responses_fp,
    responses.v as response_v,
    masks.rid as mask_rid, masks.len as mask_len, masks.total as mask_sum, masks.fp as mask_fp,
    masks.content as mask_content, masks.added as mask_added, masks.m as mask_m,
    losses.rid as loss_rid, losses.len as loss_len, losses.total as loss_sum, losses.fp as loss_fp,
    ids.rid as ids_rid, ids.len as ids_len, ids.fp as ids_fp, ids.v as ids_v, ids.c as ids_c,
    positions.rid as positions_rid, positions.len as positions_len,
    uids.rid as uid_rid, uids.fp as uid_fp,
    rewards.rid as reward_rid, rewards.total as reward,
    turns.total as num_turns,
    tags.rid as tags_rid, tags.prompt_len as prompt_len_tag, tags.response_len as response_len_tag,
    tags.seq_len as seq_len_tag
from whose
left join prompts using (id) left join responses using (id) left join masks using (id) left join losses using (id)
left join ids using (id) left join positions using (id) left join uids using (id) left join rewards using (id)
left join turns using (id) left join tags using (id);

create or replace temp table expected as
select
    k,
    count(*) as n,
    case when count(response_v) = count(*) then cast(sum(response_v) % 18446744073709551616 as ubigint) end as response_v,
    case when count(mask_m) = count(*) then cast(sum(mask_m) % 18446744073709551616 as ubigint) end as mask_m,
    case when count(ids_v) = count(*) then cast(sum(ids_v) % 18446744073709551616 as ubigint) end as ids_v,
    case when count(ids_c) = count(*) then cast(sum(ids_c) % 18446744073709551616 as ubigint) end as ids_c
from keyed left join base using (id)
where k in (select k from events where entity = 'trajectory')
group by k;

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
