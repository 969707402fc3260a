-- code: KEY004
-- name: rows are no copies
-- severity: error
-- says: Two trajectories of different prompts do not share their response and its log-probs, bit for bit, when a sampler's log-probs sum to less than -50; where they sum to less than -1, a warning. Two groups of one prompt may, unless the way they were drawn left such an answer a chance below exp(-50): greedy answers to one prompt are alike.
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
with answers as materialized (
    select b.id, b.step_id, responses_fp, response_len, sum_in, group_id, hash(prompt_len, prompts_fp) as prompt
    from base as b join token_sum_cells as t using (id)
    where not is_padding and response_len > 0 and t.op = 'produce' and t.field = 'rollout_log_probs'
        and t.stage in ('rollout', 'balance') and sum_in < -1 and group_id is not null
),
copied as (
    select step_id, responses_fp, response_len, sum_in
    from answers
    group by all
    having min(group_id) <> max(group_id) and (sum_in < -50 or min(prompt) <> max(prompt))
)
select distinct id, step_id, responses_fp, response_len, group_id
from answers as a
where exists (
    select 1 from copied as c
    where c.step_id = a.step_id and c.response_len = a.response_len and c.sum_in = a.sum_in
        and c.responses_fp is not distinct from a.responses_fp
);
insert into suspects
select rid from events
where op = 'produce' and field = 'rollout_log_probs' and stage in ('rollout', 'balance')
    and step_id in (select step_id from alike);
create or replace temp table answered_how as
-- How the answers of a step were drawn: as the engine recorded it, else as the configuration says.
with settings as (
    select distinct run_id, step_id, coalesce(partition = 'val', false) as validates,
        case when partition = 'val' then 'actor_rollout_ref.rollout.val_kwargs.' else 'actor_rollout_ref.rollout.' end as which
    from events
    where op = 'produce' and field = 'rollout_log_probs' and step_id in (select step_id from alike)
),
recorded as (
    -- of several ways the one that leaves least to chance
    select step_id, coalesce(partition = 'val', false) as validates, bool_and(coalesce(sampling.do_sample, true)) as samples,
        min(sampling.temperature) as temperature, min(sampling.top_p) as top_p,
        min(sampling.top_k) filter (sampling.top_k > 0) as top_k, any_value(sampling.logprobs_mode) as mode
    from events
    where op = 'generate' and stage = 'rollout' and sampling is not null and step_id in (select step_id from alike)
    group by all
)
select s.step_id, s.validates,
    coalesce(r.samples, setting(s.run_id, s.which || 'do_sample') is distinct from 'false') as samples,
    -- a validation that does not say its temperature may be greedy
    coalesce(r.temperature, try_cast(setting(s.run_id, s.which || 'temperature') as double),
        case when s.validates then 0 else coalesce(try_cast(setting(s.run_id, 'temperature') as double), 1) end) as temperature,
    coalesce(r.top_p, try_cast(setting(s.run_id, s.which || 'top_p') as double), 1) as top_p,
    coalesce(r.top_k, try_cast(setting(s.run_id, s.which || 'top_k') as bigint), -1) as top_k,
    coalesce(r.mode, setting(s.run_id, 'actor_rollout_ref.rollout.logprobs_mode'), 'raw_logprobs') as mode
from settings as s left join recorded as r using (step_id, validates);
with written as (
    select k.id, min(e.rid) as rid, any_value(e.fingerprint) as fp, any_value(e.sum_in) as sum_in
    from elements as e
    join keys as k using (run, key)
    join alike using (id)
    group by k.id
),
chances as (
    -- the log of the greatest chance that its answer can have had
    select w.*, case
        when not samples or temperature <= 0 or top_p <= 0 or (temperature < 1 and mode not like 'processed%') then 0
        -- a nucleus makes a token likelier by 1 / top_p, and one of the top k is on average no rarer than 1 / k
        else least(0, greatest(
            w.sum_in / case when mode like 'processed%' then 1 else temperature end
                - ln(top_p) * coalesce(b.mask_sum, b.response_len),
            case when top_k > 0 then -ln(top_k) * coalesce(b.mask_sum, b.response_len) end
        )) end as log_p
    from written as w
    join base as b using (id)
    join events as e using (rid)
    join answered_how as h on h.step_id = e.step_id and h.validates = coalesce(e.partition = 'val', false)
),
same as (
    select a.*, w.rid, w.sum_in, w.log_p, k.key, b.prompt_len, b.prompts_fp,
        first_value(w.log_p) over copies as first_log_p,
        first_value(k.key) over copies as first_key, first_value(a.group_id) over copies as first_group,
        first_value(struct_pack(n := b.prompt_len, fp := b.prompts_fp)) over copies as first_prompt
    from alike as a
    join chances as w using (id)
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
    -- one prompt twice in a batch may be answered twice alike, unless one of the two was that rare
    and (least(log_p, first_log_p) < -50 or first_prompt <> struct_pack(n := prompt_len, fp := prompts_fp))
