-- code: LEN005
-- name: within the limits
-- severity: error
-- says: A real trajectory has at most max_prompt_length prompt and max_response_length response tokens, and with truncation=error no prompt is cut.
-- needs: key, valid_length
-- fields: prompts, responses
-- examines: select count(*) from base join (select step_id, coalesce(setting(any_value(run_id), 'data.max_response_length'), setting(any_value(run_id), 'data.max_prompt_length')) as told from events group by step_id) using (step_id) where told is not null and not is_padding
-- subsumed_by: LEN001
-- source: data.max_prompt_length, data.max_response_length and data.truncation of verl
-- causes: The budget was set anew for every turn or after an abort instead of being what the response has left, or tokens were added after the prompt was measured.
-- reports: THUDM/slime#2261, huggingface/trl#4358
-- faults: budget_anew_after_an_abort, budget_of_a_turn, prompt_limit_not_passed_on, system_prompt_after_the_limit, workers_own_truncation
with limits as materialized (
    -- max_completion_length of TRL is none: it limits a request, and a rollout_func may string several together
    select step_id,
        try_cast(coalesce(setting(run_id, 'actor_rollout_ref.rollout.prompt_length'), setting(run_id, 'data.max_prompt_length')) as bigint) as prompt_limit,
        try_cast(coalesce(setting(run_id, 'actor_rollout_ref.rollout.response_length'), setting(run_id, 'data.max_response_length')) as bigint) as response_limit,
        setting(run_id, 'data.truncation') as truncation
    from (select distinct step_id, run_id from events)
),
long as (
    select * from base join limits using (step_id)
    where not is_padding and (prompt_len > prompt_limit or response_len > response_limit)
)
select prompts_rid as rid, key, 'at most ' || prompt_limit || ' prompt tokens' as expected, prompt_len::varchar as actual,
    null as detail, null as severity
from long join keys using (id)
where prompt_len > prompt_limit
union all
select responses_rid, key, 'at most ' || response_limit || ' response tokens', response_len::varchar, null, null
from long join keys using (id)
where response_len > response_limit
union all
select t.rid, key, 'a whole prompt: data.truncation=error', printf('cut from %d to %d tokens', t.truncated_from, t.valid_length), null, null
from turn_cells as t join limits using (step_id) join keys using (id)
where t.role = 'prompt' and t.truncated_from > t.valid_length and truncation = 'error'
