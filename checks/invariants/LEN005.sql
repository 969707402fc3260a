-- code: LEN005
-- name: within the limits
-- severity: error
-- says: A real trajectory has at most max_prompt_length prompt and max_response_length response tokens, and with truncation=error no prompt is cut. Where verl's own loops run the sessions, no trajectory has more turns of the policy than max_assistant_turns nor more answers to it than max_user_turns, and a response of one request that ended by length has the whole max_response_length, or what rollout.max_model_len leaves of it.
-- needs: key, valid_length
-- fields: prompts, responses
-- examines: select count(*) from base join (select step_id, coalesce(setting(any_value(run_id), 'data.max_response_length'), setting(any_value(run_id), 'data.max_prompt_length')) as told from events group by step_id) using (step_id) where told is not null and not is_padding
-- subsumed_by: LEN001
-- source: data.max_prompt_length, data.max_response_length and data.truncation of verl
-- causes: The budget was set anew for every turn or after an abort instead of being what the response has left, or tokens were added after the prompt was measured; a limit of the configuration never reaches the loop, or the engine has one of its own.
-- reports: THUDM/slime#2261, huggingface/trl#4358
-- faults: budget_anew_after_an_abort, budget_of_a_turn, half_the_budget, limit_of_turns_never_arrives, prompt_limit_not_passed_on, system_prompt_after_the_limit, workers_own_truncation
create or replace temp table loop_limits as
-- an agent loop of the user's own may ask for less, and go on as long as it likes
select run_id,
    try_cast(setting(run_id, 'actor_rollout_ref.rollout.multi_turn.max_assistant_turns') as bigint) as policy_turns,
    try_cast(setting(run_id, 'actor_rollout_ref.rollout.multi_turn.max_user_turns') as bigint) as user_turns,
    try_cast(setting(run_id, 'actor_rollout_ref.rollout.max_model_len') as bigint) as model_len
from (select distinct run_id from events) as runs
where coalesce(setting(run_id, 'actor_rollout_ref.rollout.agent.agent_loop_config_path'), '') = ''
    and coalesce(setting(run_id, 'actor_rollout_ref.rollout.agent.default_agent_loop'), 'single_turn_agent')
        in ('single_turn_agent', 'tool_agent')
    and not exists (
        select 1 from events as e
        where e.stage = 'dataset' and e.run_id is not distinct from runs.run_id
            and not list_has_all(['single_turn_agent', 'tool_agent'], string_split(e.attrs['agent_name'], ','))
    );
create or replace temp table limits_by_step as
select distinct e.step_id, l.* from events as e join loop_limits as l on l.run_id is not distinct from e.run_id;
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
),
-- a request whose answer is the whole response of its session, and has less than the session had room for
short as (
    select a.rid, b.id, b.prompt_len, a.answer_len, l.response_limit, own.model_len
    from engine_answers as a
    join limits as l using (step_id)
    join limits_by_step as own using (step_id)
    join base as b on hash(b.group_id, b.session_id) = a.place and b.response_len = a.answer_len and b.responses_fp = a.answer_fp
    where a.finish_reason = 'length' and a.answer_len < l.response_limit and not b.is_padding
        and (own.model_len is null or b.prompt_len + a.answer_len < own.model_len - 1)
),
spoken as (
    select t.id, any_value(t.rid) as rid, count(*) filter (t.role = 'policy') as policy,
        count(*) filter (t.role = 'observation') as observed, any_value(own.policy_turns) as policy_turns,
        any_value(own.user_turns) as user_turns
    from turn_cells as t join limits_by_step as own using (step_id)
    where own.policy_turns > 0 or own.user_turns > 0
    group by t.id
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
union all
select s.rid, key, printf('the whole budget of %d response tokens', s.response_limit), s.answer_len::varchar,
    'ended by length', null
from short as s join keys using (id)
union all
select s.rid, key, printf('at most %d turns of the policy', s.policy_turns), s.policy::varchar, 'max_assistant_turns', null
from spoken as s join keys using (id)
where s.policy_turns > 0 and s.policy > s.policy_turns
union all
select s.rid, key, printf('at most %d answers to the policy', s.user_turns), s.observed::varchar, 'max_user_turns', null
from spoken as s join keys using (id)
where s.user_turns > 0 and s.observed > s.user_turns
