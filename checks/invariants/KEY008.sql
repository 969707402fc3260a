-- code: KEY008
-- name: a group has one prompt
-- severity: error
-- says: The first outputs of one uid start from one prompt, that of the dataset row the uid stands for, and carry its ground truth, and inside a step uids and drawn rows are one to one. A warning where an agent loop of the user's own may change the prompt.
-- needs: key, fingerprint
-- fields: prompts
-- examines: select sum(n) from events where op = 'produce' and field = 'prompts' and stage = 'rollout' and entity = 'trajectory'
-- subsumed_by: KEY001
-- source: S3; TRL printed completions under prompts that were not theirs
-- causes: Prompts or completions were rolled, strided or gathered in another order than the uids, a repeat interleaved where the keys tile, or one uid was given to two prompts.
-- reports: huggingface/trl#3098
-- faults: closure_over_the_first_prompt, completions_rolled_by_one, dataset_columns_of_the_next_row, ground_truths_rolled_against_prompts, keys_tile_where_prompts_repeat, uids_rolled_against_prompts
create or replace temp table group_prompts as
select b.step_id, b.group_id, min(b.prompt_len) as prompt_len, min(b.prompts_fp) as low, max(b.prompts_fp) as high,
    min(b.raw_prompt_fp) as raw_low, max(b.raw_prompt_fp) as raw_high
from base as b
where not b.is_padding and b."index" = 0 and b.prompts_fp is not null
group by all;
create or replace temp table asked as
-- a uid, the dataset row it stands for and what it asks
with registered as (
    select id, step_id, coalesce(partition, '') = 'val' as val, source_index, rid
    from group_cells
    where stage = 'prompt' and op = 'produce' and entity = 'prompt' and source_index is not null
)
select r.id, k.prompt_id as group_id, k.key as uid, r.step_id, r.val, r.source_index, r.rid, p.fingerprint as fp, p.rid as asked_rid
from registered as r
join keys as k using (id)
left join (select id, step_id, min(fingerprint) as fingerprint, min(rid) as rid from prompt_cells group by all) as p
    using (id, step_id);
with drawn as (
    -- a validation draws from another file
    select step_id, coalesce(partition, '') = 'val' as val, source_index, any_value(fingerprint) filter (field = 'raw_prompt') as fp,
        any_value(fingerprint) filter (field = 'reward_model') as truth, count(*) filter (field = 'index') as times
    from dataset_cells
    group by all
),
loops as (
    select step_id,
        coalesce(setting(run_id, 'actor_rollout_ref.rollout.agent.agent_loop_config_path'), '') = ''
            and coalesce(setting(run_id, 'actor_rollout_ref.rollout.agent.default_agent_loop'), 'single_turn_agent')
                in ('single_turn_agent', 'tool_agent') as own,
        coalesce(try_cast(setting(run_id, 'data.max_prompt_length') as bigint), 9223372036854775807) as limit_
    from (select distinct run_id, step_id from events)
),
shared as (
    -- one prompt of tokens made of two messages; one cut to its limit may end like another
    select step_id, low as fp, min_by(raw_low, group_id) as raw
    from group_prompts join loops using (step_id)
    where low = high and prompt_len < limit_
    group by all
    having min(raw_low) <> max(raw_low)
),
doubtful as (
    select step_id, group_id from group_prompts where low <> high
    union
    select step_id, group_id from group_prompts join asked using (step_id, group_id) where raw_low <> fp or raw_high <> fp
    union
    select step_id, group_id from group_prompts as g join shared as s using (step_id) where g.low = s.fp
),
rows as (
    select d.step_id, d.group_id, k.uid, k.key, b.prompts_rid, b.prompt_len, b.prompts_fp, b.raw_prompt_rid, b.raw_prompt_fp,
        case when not l.own then 'warning' end as severity,
        mode(b.prompts_fp order by b.session_id) over (partition by d.step_id, d.group_id) as group_fp
    from doubtful as d
    join base as b on b.group_id = d.group_id and b.step_id = d.step_id
    join keys as k on k.id = b.id
    join loops as l on l.step_id = d.step_id
    where not b.is_padding and b."index" = 0 and b.prompts_fp is not null
)
select prompts_rid as rid, key, printf('the prompt of its group, fingerprint %x', group_fp) as expected,
    printf('%d tokens, fingerprint %x', prompt_len, prompts_fp) as actual, 'uid ' || uid as detail, severity
from rows
where prompts_fp <> group_fp
union all
select raw_prompt_rid, key, printf('raw_prompt %x, what the uid asks', a.fp), printf('raw_prompt %x', raw_prompt_fp),
    'uid ' || r.uid, severity
from rows as r join asked as a using (step_id, group_id)
where raw_prompt_fp <> a.fp
union all
select prompts_rid, key, printf('the tokens of raw_prompt %x', raw_prompt_fp),
    printf('%d tokens, those of raw_prompt %x', prompt_len, s.raw), 'two messages, one prompt of tokens', severity
from rows as r join shared as s on s.step_id = r.step_id and s.fp = r.prompts_fp
where raw_prompt_fp <> s.raw
union all
select a.asked_rid, a.uid, printf('raw_prompt %x, that of dataset row %d', d.fp, a.source_index),
    printf('raw_prompt %x', a.fp), 'the uid is registered for this row', null
from asked as a join drawn as d using (step_id, val, source_index)
where a.fp <> d.fp
union all
select b.truth_rid, k.key, printf('reward_model %x, that of dataset row %d', d.truth, a.source_index),
    printf('reward_model %x', b.truth_fp), 'uid ' || a.uid, null
from asked as a
join drawn as d using (step_id, val, source_index)
join base as b on b.group_id = a.group_id and b.step_id = a.step_id
join keys as k on k.id = b.id
where not b.is_padding and b.truth_fp <> d.truth
union all
select max(rid), uid, 'one dataset row', printf('rows %s', string_agg(distinct source_index, ', ' order by source_index)),
    'rows one uid is registered for', null
from asked
semi join (select step_id, id from asked group by all having min(source_index) <> max(source_index)) using (step_id, id)
group by step_id, uid
union all
select a.rid, a.uid, printf('%d uids of dataset row %d, as often as it was drawn', d.times, a.source_index),
    printf('%d uids', a.uids), null, null
from (
    select step_id, val, source_index, count(distinct id) as uids, max(rid) as rid, max(uid) as uid from asked group by all
) as a join drawn as d using (step_id, val, source_index)
where d.times > 0 and a.uids > d.times
