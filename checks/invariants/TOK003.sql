-- code: TOK003
-- name: prompts extend the conversation
-- severity: error
-- says: The prompt of a later turn is the prompt of the turn before, its response and what was observed since, less a declared trim.
-- needs: key, turn, start, marks, fingerprint
-- fields: turns, prompts, responses
-- examines: select count(*) from turn_cells as t join keys using (id) join ribbons as r using (id) where t.role = 'policy' and r.trims = 0 and t.start > r.prompt_len and t.before is not null and hash(group_id, session_id) in (select place from engine_answers where prompt_fp is not null)
-- subsumed_by: TOK002, MSK006
-- source: 04 Agent Loop: a session's tokens are only ever added to
-- causes: The next prompt was rendered again from messages: earlier reasoning or a tool call was stripped, the end token fell away, only the last step was kept.
-- reports: NVIDIA-NeMo/RL#2821, PrimeIntellect-ai/prime-rl#1334, PrimeIntellect-ai/prime-rl#1383, huggingface/trl#6673, verl-project/verl#3720, verl-project/verl#3960, vllm-project/vllm#28185
-- faults: calls_cleared_from_the_history, earlier_answers_twice, end_token_lost_at_the_border, newline_only_in_the_rendering, only_the_last_step_goes_on, prompts_by_stride, thoughts_stripped_from_the_history
with later as (
    select t.id, t.turn, t."start", t.before, t.valid_length as answer_len, t.fingerprint as answer_fp,
        hash(group_id, session_id) as place
    from turn_cells as t join keys using (id) join ribbons as r using (id)
    where t.role = 'policy' and r.trims = 0 and t."start" > r.prompt_len and t.before is not null
)
select coalesce(a.prompt_rid, a.rid) as rid, key,
    printf('prompt of %d tokens, fingerprint %x', any_value(l."start"), any_value(l.before)) as expected,
    printf('prompt of %d tokens, fingerprint %x', any_value(a.prompt_len), any_value(a.prompt_fp)) as actual,
    printf('turn %d: not the conversation so far', l.turn) as detail, null as severity
from later as l
join engine_answers as a using (place, answer_len, answer_fp)
join keys using (id)
where a.prompt_fp is not null
group by id, key, l.turn, coalesce(a.prompt_rid, a.rid)
having not bool_or(a.prompt_len = l."start" and a.prompt_fp = l.before)
