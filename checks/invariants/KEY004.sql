-- code: KEY004
-- name: rows are no copies
-- severity: error
-- says: Two trajectories of different prompts do not share their response and its log-probs, bit for bit, when a sampler's log-probs sum to less than -50; where they sum to less than -1, a warning.
-- needs: key, fingerprint, sum
-- fields: responses, rollout_log_probs
-- examines: select sum(n) from events where op = 'produce' and field = 'rollout_log_probs' and stage in ('rollout', 'balance')
-- subsumed_by: KEY001, KEY002, KEY008
-- source: torchtune's replay buffer filled a batch with copies of one row; log-probs depend on the prompt, so no two prompts agree in them by chance
-- causes: A row was broadcast or copied over others (a buffer sampled with replacement, an index that stayed 0, a gather that returned one rank's rows), so that the batch holds less than it says.
-- reports: meta-pytorch/torchtune#2981
-- faults: buffer_of_one_row, gather_returns_one_rank
create or replace temp table alike as
-- a copy has the same sum of log-probs, to the bit: few rows are read for their fingerprints
select distinct id, step_id, responses_fp, response_len, group_id
from (
    select b.id, b.step_id, responses_fp, response_len, sum_in, hash(prompt_len, prompts_fp) as prompt
    from base as b join token_sum_cells as t using (id)
    where not is_padding and response_len > 0 and t.op = 'produce' and t.field = 'rollout_log_probs'
        and t.stage in ('rollout', 'balance') and sum_in < -1
    qualify count(*) over (partition by b.step_id, responses_fp, response_len, sum_in) > 1
)
join keys using (id)
where group_id is not null
window same as (partition by step_id, responses_fp, response_len, sum_in)
qualify min(group_id) over same <> max(group_id) over same
    and (sum_in < -50 or min(prompt) over same <> max(prompt) over same);
insert into suspects
select rid from events
where op = 'produce' and field = 'rollout_log_probs' and stage in ('rollout', 'balance')
    and step_id in (select step_id from alike);
with written as (
    select k.id, min(e.rid) as rid, any_value(e.fingerprint) as fp, any_value(e.sum_in) as sum_in
    from elements as e
    join keys as k using (run, key)
    join alike using (id)
    group by k.id
),
same as (
    select a.*, w.rid, w.sum_in, k.key, b.prompt_len, b.prompts_fp,
        first_value(k.key) over copies as first_key, first_value(a.group_id) over copies as first_group,
        first_value(struct_pack(n := b.prompt_len, fp := b.prompts_fp)) over copies as first_prompt
    from alike as a
    join written as w using (id)
    join keys as k using (id)
    join base as b using (id)
    window copies as (
        partition by a.step_id, a.responses_fp, a.response_len, w.fp order by w.rid, k.key
        rows between unbounded preceding and unbounded following
    )
)
select rid, key, 'a response of its own' as expected, 'the response and log-probs of ' || first_key as actual,
    printf('%d tokens, log-probs sum to %.1f', response_len, sum_in) as detail,
    case when sum_in >= -50 then 'warning' end as severity
from same
where group_id <> first_group and sum_in < -1
    -- one prompt twice in a batch may be answered twice alike, unless the answer is that long
    and (sum_in < -50 or first_prompt <> struct_pack(n := prompt_len, fp := prompts_fp))
