-- code: REW003
-- name: the scorer reads the final response
-- severity: error
-- says: What the scorer reads is the response of the session's final output, its length and its tokens, beside the ground truth that the trajectory carries.
-- needs: key, valid_length, fingerprint
-- fields: rm_scores, responses
-- examines: select sum(events.n) from events join expected using (k) where entity = 'trajectory' and stage = 'reward' and field = 'responses' and op in ('consume', 'pad') and c is not null and response_c is not null
-- subsumed_by: KEY001, KEY002, KEY008, LEN003, QUE003, TOK004
-- source: the seeds' session score by the last output; verl 0.9.1 scores sessions of several outputs on an empty string
-- causes: The scorer was handed the prompt, one turn, an earlier output or nothing at all; a response cut or decoded for another row, or the dataset row of another prompt.
-- reports: modelscope/ms-swift#10149, rllm-org/rllm#663, verl-project/verl#6392
-- faults: the_first_output_is_scored, the_manager_caches_the_ground_truth, the_manager_cuts_what_it_decodes, the_manager_keeps_the_first_answer, the_next_row_of_the_batch_is_scored, the_scorer_counts_turns, the_scorer_is_given_nothing, the_scorer_is_given_the_row_of_another_prompt, the_scorer_loses_the_end_token, the_scorer_reads_another_sessions_answer, the_scorer_reads_what_others_wrote
insert into suspects
select rid
from events join expected using (k)
where entity = 'trajectory' and stage = 'reward' and op in ('consume', 'pad')
    and c <> case field when 'responses' then response_c when 'reward_model' then truth_c end;
select e.rid, e.key, printf('%d tokens, fingerprint %x', b.response_len, b.responses_fp) as expected,
    printf('%d tokens, fingerprint %x', e.valid_length, e.fingerprint) as actual,
    case when e.valid_length = 0 then 'the scorer was given nothing' else 'the response as written, and as the scorer read it' end as detail,
    null as severity
from elements as e
join keys as k using (run, key)
join base as b using (id)
where e.stage = 'reward' and e.field = 'responses' and (e.fingerprint <> b.responses_fp or e.valid_length <> b.response_len)
    -- where the scorer read what the turns are made of, what was written afterwards is at fault (TOK002)
    and not exists (select 1 from ribbons as r where r.id = b.id and r.fp = compose(b.prompts_fp, b.prompt_len, e.fingerprint))
union all
select e.rid, e.key, printf('reward_model %x', b.truth_fp), printf('reward_model %x', e.fingerprint),
    'the ground truth as the trajectory carries it, and as the scorer was given it', null
from elements as e
join keys as k using (run, key)
join base as b using (id)
where e.stage = 'reward' and e.field = 'reward_model' and e.fingerprint <> b.truth_fp
    -- where it is the dataset's for this uid, or goes with the prompt that was run, something else is at fault (KEY008)
    and not exists (
        select 1 from group_cells as g
        join keys as u on u.id = g.id
        join dataset_cells as d on d.step_id = g.step_id and d.source_index = g.source_index
        where u.prompt_id = k.group_id and g.stage = 'prompt' and g.op = 'produce'
            and d.field = 'reward_model' and d.fingerprint = e.fingerprint
    )
    and not exists (
        select 1 from base as o where o.step_id = b.step_id and o.truth_fp = e.fingerprint and o.prompts_fp = b.prompts_fp
    )
    -- nor where the prompts of its group are mixed with another's, and the scorer was given the same of the other's
    and not exists (
        select 1 from base as o
        join elements as other on other.rid = e.rid and other.fingerprint = e.fingerprint
        join keys as ok on ok.run = other.run and ok.key = other.key and ok.id = o.id
        join base as own on own.step_id = b.step_id and own.group_id = b.group_id and own.prompts_fp <> b.prompts_fp
        where o.step_id = b.step_id and o.prompts_fp = b.prompts_fp and o.group_id <> b.group_id
    )
union all
select c.rid, k.key, 'output ' || l.last || ' scored', 'output ' || k."index" || ' scored',
    'the last output of a session is its result', null
from reward_cells as c
join keys as k using (id)
join last_outputs as l on l.group_id = k.group_id and l.session_id = k.session_id and l.last > k."index"
join keys as f on f.group_id = l.group_id and f.session_id = l.session_id and f."index" = l.last
join base as b on b.id = f.id
where c.field = 'rm_scores' and c.op = 'score' and b.responses_rid is not null
    and f.id not in (select id from reward_cells where field = 'rm_scores' and op = 'score')
