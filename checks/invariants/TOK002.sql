-- code: TOK002
-- name: trained on what the engine returned
-- severity: error
-- says: The ids the engine returned are the ids that are trained on, and the prompt it was sent is the trajectory's prompt.
-- needs: key, valid_length, fingerprint
-- fields: prompts, responses
-- examines: select count(*) from base where not is_padding and (hash(group_id, session_id) in (select place from engine_answers where answer_fp is not null) or hash(step_id) in (select place from engine_answers where answer_fp is not null))
-- subsumed_by: MSK006, LEN001, KEY003
-- source: token in, token out: what the policy is trained on is what it generated
-- causes: Text was tokenised again on one of the two paths: a second bos, an expanded placeholder, a lost prefix, a merge that falls otherwise, a newline the template adds.
-- reports: PrimeIntellect-ai/prime-rl#1983, huggingface/trl#3686, huggingface/trl#3853, huggingface/trl#6294, modelscope/ms-swift#10012, rllm-org/rllm@d100aa77
-- faults: answers_of_the_neighbour, end_forced_on_cut_answers, engine_cuts_the_prompt, injected_prefix_not_trained, padding_sent_to_the_engine, placeholder_expanded_twice, responses_encoded_when_written, sessions_kept_as_text, two_bos
create or replace temp table unanswered as
with mine as (
    select t.rid, t.id, t.ord, t.turn, t."start", t.before, t.valid_length as answer_len, t.fingerprint as answer_fp,
        t.truncated_from is not null or t.trimmed is not null as cut
    from turn_cells as t
    where t.role = 'policy' and t.valid_length > 0
    union all
    select responses_rid, id, null, 1, prompt_len, prompts_fp, response_len, responses_fp, false
    from base
    where not is_padding and mask_sum = response_len and id not in (select id from ribbons)
),
spoken as (
    select m.*, group_id, session_id, base.prompt_len,
        case when hash(group_id, session_id) in (select place from engine_answers) then hash(group_id, session_id) else hash(base.step_id) end as place
    from mine as m join base using (id)
),
answered as (
    select distinct place, answer_len, answer_fp, true as found from engine_answers
),
sent as (
    select distinct place, answer_len, answer_fp, prompt_len as "start", prompt_fp as before, true as found from engine_answers
)
select s.*, a.found is null as foreign_answer
from spoken as s
left join answered as a using (place, answer_len, answer_fp)
left join sent as p using (place, answer_len, answer_fp, "start", before)
where s.place in (select place from engine_answers where answer_fp is not null)
    and case when a.found then s."start" = s.prompt_len and p.found is null and s.before is not null else not s.cut end;
create or replace temp table resumed as
with doubted as (select distinct place, group_id, session_id from unanswered where foreign_answer),
wrote as (
    select place, sum(valid_length) as length, sum(compose(0, cast(begin as bigint), fingerprint)) % 18446744073709551616 as fp
    from (
        select d.place, t.valid_length, t.fingerprint,
            sum(t.valid_length) over (partition by d.place order by keys."index", t.turn) - t.valid_length as begin
        from turn_cells as t join keys using (id) join doubted as d using (group_id, session_id)
        where t.role = 'policy'
    )
    group by place
),
gave as (
    select place, sum(answer_len) as length, sum(compose(0, cast(begin as bigint), answer_fp)) % 18446744073709551616 as fp
    from (
        select place, answer_len, answer_fp, sum(answer_len) over (partition by place order by number) - answer_len as begin
        from engine_answers
        where place in (select place from doubted)
    )
    group by place
)
select wrote.place from wrote join gave using (place) where wrote.length = gave.length and wrote.fp = gave.fp;
select u.rid, key,
    coalesce((select printf('%d tokens, fingerprint %x', a.answer_len, a.answer_fp) from engine_answers as a
        where a.place = u.place and a.prompt_len = u."start" and a.prompt_fp = u.before limit 1), 'an answer of the engine') as expected,
    printf('%d tokens, fingerprint %x', u.answer_len, u.answer_fp) as actual,
    'the engine returned no such answer' as detail, null as severity
from unanswered as u join keys using (id)
where foreign_answer and u.place not in (select place from resumed)
union all
select coalesce(a.prompt_rid, a.rid), key, printf('prompt of %d tokens, fingerprint %x', u."start", u.before),
    printf('prompt of %d tokens, fingerprint %x', a.prompt_len, a.prompt_fp), 'sent to the engine', null
from unanswered as u join keys using (id)
join (
    select place, answer_len, answer_fp, min(rid) as rid, arg_min(prompt_rid, number) as prompt_rid,
        arg_min(prompt_len, number) as prompt_len, arg_min(prompt_fp, number) as prompt_fp
    from engine_answers where prompt_fp is not null
    group by place, answer_len, answer_fp
) as a using (place, answer_len, answer_fp)
where not foreign_answer
union all
select b.responses_rid, key, printf('fingerprint %x: that of its turns', r.fp),
    printf('fingerprint %x', compose(b.prompts_fp, b.prompt_len, b.responses_fp)), 'prompts and responses as written', null
from ribbons as r join base as b using (id) join keys using (id)
where r.seq_len = b.prompt_len + b.response_len and r.fp <> compose(b.prompts_fp, b.prompt_len, b.responses_fp)
