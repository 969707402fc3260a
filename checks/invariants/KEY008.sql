-- code: KEY008
-- name: a group has one prompt
-- severity: error
-- says: The first outputs of one uid start from one prompt, that of the dataset row the uid stands for, and inside a step uids and drawn rows are one to one. A warning where an agent loop of the user's own may change the prompt.
-- needs: key, fingerprint
-- fields: prompts
-- examines: select sum(n) from events where op = 'produce' and field = 'prompts' and stage = 'rollout' and entity = 'trajectory'
-- subsumed_by: KEY001
-- source: S3; TRL printed completions under prompts that were not theirs
-- causes: Prompts or completions were rolled, strided or gathered in another order than the uids, a repeat interleaved where the keys tile, or one uid was given to two prompts.
create or replace temp table firsts_of_groups as
select k.group_id, k.uid, b.step_id, b.id, b.prompts_rid, b.prompt_len, b.prompts_fp, b.raw_prompt_rid, b.raw_prompt_fp
from base as b join keys as k using (id)
where not b.is_padding and k."index" = 0 and b.prompts_fp is not null;
create or replace temp table asked as
-- a uid, the dataset row it stands for and what it asks
with registered as (
    select id, step_id, source_index, rid
    from group_cells
    where stage = 'prompt' and op = 'produce' and entity = 'prompt' and source_index is not null
)
select r.id, hash(k.key) as group_id, k.key as uid, r.step_id, r.source_index, r.rid, p.fingerprint as fp, p.rid as asked_rid
from registered as r
join keys as k using (id)
left join (select id, step_id, min(fingerprint) as fingerprint, min(rid) as rid from prompt_cells group by all) as p
    using (id, step_id);
with drawn as (
    select step_id, source_index, any_value(fingerprint) filter (field = 'raw_prompt') as fp,
        count(*) filter (field = 'index') as times
    from dataset_cells
    group by all
),
loops as (
    select distinct e.step_id,
        coalesce(setting(run_id, 'actor_rollout_ref.rollout.agent.agent_loop_config_path'), '') = ''
        and coalesce(setting(run_id, 'actor_rollout_ref.rollout.agent.default_agent_loop'), 'single_turn_agent')
            in ('single_turn_agent', 'tool_agent') as own
    from (select distinct run_id, step_id from events) as e
),
mixed as (
    select step_id, group_id, mode(prompts_fp order by id) as fp
    from firsts_of_groups
    where (step_id, group_id) in (
        select (step_id, group_id) from firsts_of_groups group by step_id, group_id having min(prompts_fp) <> max(prompts_fp)
    )
    group by all
)
select g.prompts_rid as rid, k.key, printf('the prompt of its group, fingerprint %x', m.fp) as expected,
    printf('%d tokens, fingerprint %x', g.prompt_len, g.prompts_fp) as actual, 'uid ' || g.uid as detail,
    case when not l.own then 'warning' end as severity
from mixed as m
join firsts_of_groups as g using (step_id, group_id)
join keys as k using (id)
join loops as l using (step_id)
where g.prompts_fp <> m.fp
union all
select g.raw_prompt_rid, k.key, printf('raw_prompt %x, what the uid asks', a.fp), printf('raw_prompt %x', g.raw_prompt_fp),
    'uid ' || a.uid, case when not l.own then 'warning' end
from firsts_of_groups as g
join asked as a using (group_id, step_id)
join keys as k on k.id = g.id
join loops as l on l.step_id = g.step_id
where g.raw_prompt_fp <> a.fp
union all
select g.prompts_rid, k.key, printf('the tokens of raw_prompt %x', g.raw_prompt_fp),
    printf('%d tokens, those of raw_prompt %x', g.prompt_len, s.first_raw), 'two messages, one prompt of tokens',
    case when not l.own then 'warning' end
from (
    -- a prompt cut to its limit may end like another
    select step_id, prompts_fp, prompt_len, min_by(raw_prompt_fp, id) as first_raw
    from firsts_of_groups
    where prompt_len < coalesce(
        (select max(try_cast(setting(run_id, 'data.max_prompt_length') as bigint)) from (select distinct run_id from events)),
        9223372036854775807)
    group by all
    having min(raw_prompt_fp) <> max(raw_prompt_fp)
) as s
join firsts_of_groups as g using (step_id, prompts_fp, prompt_len)
join keys as k using (id)
join loops as l using (step_id)
where g.raw_prompt_fp <> s.first_raw
union all
select a.asked_rid, a.uid, printf('raw_prompt %x, that of dataset row %d', d.fp, a.source_index),
    printf('raw_prompt %x', a.fp), 'the uid is registered for this row', null
from asked as a join drawn as d using (step_id, source_index)
where a.fp <> d.fp
union all
select max(rid), uid, 'one dataset row', printf('rows %s', string_agg(distinct source_index, ', ' order by source_index)),
    'rows one uid is registered for', null
from asked
group by step_id, uid
having min(source_index) <> max(source_index)
union all
select a.rid, a.uid, printf('%d uids of dataset row %d, as often as it was drawn', d.times, a.source_index),
    printf('%d uids', a.uids), null, null
from (
    select step_id, source_index, count(distinct uid) as uids, max(rid) as rid, max(uid) as uid from asked group by all
) as a join drawn as d using (step_id, source_index)
where d.times > 0 and a.uids > d.times
