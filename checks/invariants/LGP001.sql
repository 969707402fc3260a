-- code: LGP001
-- name: log-probs are log-probs
-- severity: error
-- says: On policy tokens a log-prob is finite and at most 0 (1e-4 of roundoff); the sampler's are exactly 0 outside the mask; a batch sampled at a temperature above 0.1, of more tokens than the best, is not all zeros, unless the policy is as certain of its tokens by its entropy, or where it is trained.
-- needs: key, nonfinite_in, max_in
-- fields:
-- examines: select sum(n) from events where entity = 'trajectory' and op <> 'compare' and field in ('log_probs', 'old_log_probs', 'ref_log_prob', 'rollout_log_probs') and nonfinite_in is not null
-- subsumed_by: QUE003, LEN001, MSK001, MSK003, MSK004
-- source: seen in verl and TRL: probabilities stored for log-probs, -inf of a truncated support, a placeholder of zeros
-- causes: The log was forgotten or taken of a truncated distribution, a buffer was not filled, or an engine gave no log-probs and zeros took their place.
-- reports: huggingface/trl#6297, vllm-project/vllm#42245
-- faults: buffer_not_filled, infinite_old_log_prob, observations_have_log_probs, placeholder_log_probs, positive_log_probs, probabilities_for_log_probs
create or replace temp table certain_steps as
-- Collapsed policies, and low temperatures: in float32 a probability is 1 long before it is.
select step_id
from events
where stage = 'update_actor' and op = 'forward' and field = 'log_probs'
group by step_id, update_index
having min(low) > -1e-3 and sum(masked) >= 8
union
select step_id
from events
where op = 'produce' and field = 'entropy' and masked >= 8
group by step_id
having max(high) < 1e-3;
create or replace temp table no_log_probs as
select rid,
    -- the sampler's zeros outside the mask are the rollout's word: who reads them later may see another mask
    field = 'rollout_log_probs' and op = 'produce' as whose,
    low = 0 and high = 0 and masked >= 16 and partition is distinct from 'val' and stage <> 'validate'
        and field <> 'log_probs' and coalesce(setting(run_id, 'actor_rollout_ref.rollout.do_sample'), 'true') <> 'false'
        and coalesce(try_cast(setting(run_id, 'actor_rollout_ref.rollout.temperature') as double), 1) > 0.1
        and coalesce(setting(run_id, 'actor_rollout_ref.rollout.top_k'), '-1') <> '1'
        and step_id not in (select step_id from certain_steps)
        as empty
from events
where entity = 'trajectory' and op <> 'compare'
    and field in ('log_probs', 'old_log_probs', 'ref_log_prob', 'rollout_log_probs')
    and (nonfinite_in > 0 or high > 1e-4 or (low = 0 and high = 0) or (field = 'rollout_log_probs' and outside > 0));
insert into suspects
select rid from no_log_probs;
select rid, key, 'finite' as expected, printf('%d tokens are not', nonfinite_in) as actual, null as detail, null as severity
from elements
where nonfinite_in > 0
union all
select rid, key, 'at most 0', printf('%.6g', max_in), 'greatest on a policy token', null
from elements
where max_in > 1e-4
union all
select rid, key, '0 outside the mask', printf('%d tokens outside are not zero', nnz_out), null, null
from elements join no_log_probs using (rid)
where whose and nnz_out > 0
union all
select rid, null, 'log-probs of tokens that were drawn', 'all zeros', printf('%d policy tokens', masked), null
from events join no_log_probs using (rid)
where empty
