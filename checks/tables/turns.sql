-- Whose tokens a trajectory is made of, as its loop said it: its turns taken together. Fingerprints are of the whole
-- sequence (``fp``) and of the mask its turns make, the prompt's part left out (``mask_fp``).
create or replace table ribbons as
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

-- Every request of the engine, with the place it was for: its session, or of engines that number theirs otherwise its step.
create or replace table engine_answers as
select
    r.rid, r.step_id, r.ord, keys."index" as number,
    case when known.group_id is null then hash(r.step_id) else hash(keys.group_id, keys.session_id) end as place,
    p.rid as prompt_rid, p.valid_length as prompt_len, p.fingerprint as prompt_fp,
    r.valid_length as answer_len, r.fingerprint as answer_fp, r.generated, r.finish_reason, r.truncated_from
from request_cells as r
join keys using (id)
left join (select distinct group_id from base) as known on known.group_id = keys.group_id
left join request_cells as p on p.id = r.id and p.step_id = r.step_id and p.field = 'prompts'
where r.field = 'responses';
