-- code: KEY009
-- name: sessions draw for themselves
-- severity: warning
-- says: At a temperature above 0, sessions of one group do not answer alike more often than their log-probs let expect: a seed of its own reaches the engine for each of them.
-- needs: key, fingerprint, sum
-- fields: responses, rollout_log_probs
-- examines: select sum(n) from events where op = 'produce' and field = 'rollout_log_probs' and stage = 'rollout' and partition is distinct from 'val' and coalesce(setting(run_id, 'actor_rollout_ref.rollout.do_sample'), 'true') = 'true' and coalesce(try_cast(setting(run_id, 'actor_rollout_ref.rollout.top_k') as bigint), -1) <= 0 and (try_cast(coalesce(setting(run_id, 'actor_rollout_ref.rollout.temperature'), setting(run_id, 'temperature')) as double) = 1 or (try_cast(coalesce(setting(run_id, 'actor_rollout_ref.rollout.temperature'), setting(run_id, 'temperature')) as double) > 0 and setting(run_id, 'actor_rollout_ref.rollout.logprobs_mode') = 'processed_logprobs'))
-- subsumed_by: KEY004
-- source: TRL's engine was seeded by rank only; exp of a session's summed log-probs is the chance of its answer, so copies can be expected or not
-- causes: Every session of a group was sent with one seed, the engine was seeded anew before each request, or the group was generated once and repeated.
-- reports: huggingface/trl#7040
-- faults: group_generated_once, one_seed_for_all_sessions
create or replace temp table sampled as
-- Steps whose log-probs are those of the sampler's own distribution; a nucleus makes an answer likelier by 1 / top_p a token.
select rid, step_id, greatest(0, -ln(top_p)) as nucleus
from (
    select e.rid, e.step_id,
        -- a run that does not say its temperature may be greedy
        try_cast(coalesce(setting(run_id, 'actor_rollout_ref.rollout.temperature'), setting(run_id, 'temperature')) as double) as temperature,
        coalesce(try_cast(setting(run_id, 'actor_rollout_ref.rollout.top_p') as double), 1) as top_p,
        coalesce(try_cast(setting(run_id, 'actor_rollout_ref.rollout.top_k') as bigint), -1) as top_k,
        coalesce(setting(run_id, 'actor_rollout_ref.rollout.do_sample'), 'true') as samples,
        setting(run_id, 'actor_rollout_ref.rollout.logprobs_mode') as mode
    from events as e
    where op = 'produce' and field = 'rollout_log_probs' and stage = 'rollout' and partition is distinct from 'val'
)
where samples = 'true' and temperature > 0 and top_p > 0 and top_k <= 0
    and (temperature = 1 or mode = 'processed_logprobs');
create or replace temp table repeated as
select distinct step_id
from (
    select step_id
    from base
    where not is_padding and "index" = 0 and responses_fp is not null and step_id in (select step_id from sampled)
    group by step_id, group_id, responses_fp, response_len
    having count(*) > 1
);
with sessions as materialized (
    select b.step_id, s.rid, id, b.group_id, b.session_id, b.responses_fp, b.response_len,
        least(0, c.sum_in + coalesce(c.mask_sum, b.response_len) * s.nucleus) as log_p
    from token_sum_cells as c
    join sampled as s using (rid)
    join base as b using (id)
    where b."index" = 0 and not b.is_padding and s.step_id in (select step_id from repeated)
),
several as materialized (
    select step_id, group_id, responses_fp, response_len, count(*) as times from sessions group by all having count(*) > 1
),
judged as (
    select s.*, key, row_number() over same as copy, first_value(key) over same as first_key
    from sessions as s
    join several as a
        on a.step_id = s.step_id and a.group_id = s.group_id and a.responses_fp is not distinct from s.responses_fp
        and a.response_len is not distinct from s.response_len
    join keys on keys.id = s.id
    window same as (partition by s.step_id, s.group_id, s.responses_fp, s.response_len order by s.session_id)
),
steps as (
    select step_id, copies, expected
    from (select step_id, sum(times - 1) as copies from several group by step_id)
    join (
        select step_id, sum(expected) as expected
        from (
            -- of an answer of chance p, (n - 1) / 2 * p is its part of the pairs of n sessions that are expected to be alike
            select step_id, sum(exp(log_p)) * (count(*) - 1) / 2 as expected from sessions group by step_id, group_id
        )
        group by step_id
    ) using (step_id)
)
select rid, key, 'an answer of its own' as expected, 'that of ' || first_key as actual,
    case when log_p < -20 then printf('%d tokens, log-probs sum to %.1f', response_len, log_p)
        else printf('%d copies in the step, %.2f expected', copies, s.expected) end as detail,
    null as severity
from judged join steps as s using (step_id)
where copy > 1 and (log_p < -20 or copies > 6 + 5 * s.expected)
