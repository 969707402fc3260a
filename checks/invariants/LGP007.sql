-- code: LGP007
-- name: no bits lost on the way to the loss
-- severity: warning
-- says: Log-probs, advantages and rewards keep their width between their producer and the loss; float32 log-probs do not hold numbers of half as many bits.
-- needs: dtype, max_in
-- fields:
-- examines: select sum(n) from events where entity = 'trajectory' and op <> 'compare' and field in ('log_probs', 'old_log_probs', 'ref_log_prob', 'rollout_log_probs', 'advantages', 'returns', 'token_level_rewards', 'rollout_is_weights') and dtype is not null
-- subsumed_by: QUE003, LGP001
-- source: seen in slime and open-instruct: log-probs stored, moved or computed in bfloat16
-- causes: A cast to the model's dtype on the way to the device, or log_softmax taken inside an autocast region.
-- reports: THUDM/slime#245
-- faults: sampler_log_probs_in_bfloat16
with wide as (
    select rid, run_id, stage, field, dtype, low, high, masked,
        case when dtype like '%64' then 3 when dtype like '%32' then 2 when dtype like '%16' then 1 else 0 end as width,
        max(case when dtype like '%64' then 3 when dtype like '%32' then 2 when dtype like '%16' then 1 else 0 end)
            over (partition by run_id, global_steps, field order by ord) as before
    from events
    where entity = 'trajectory' and op <> 'compare' and dtype like '%float%' and stage not in ('metrics', 'dump', 'clear')
        and field in ('log_probs', 'old_log_probs', 'ref_log_prob', 'rollout_log_probs', 'advantages', 'returns',
            'token_level_rewards', 'rollout_is_weights')
)
select rid, null as key, case before when 3 then 'float64' else 'float32' end || ', as it was made' as expected,
    dtype as actual, null as detail, null as severity
from wide
where width < before
union all
-- the least and the greatest of a batch are both whole in eleven bits by accident once in 2^26
select rid, null, 'numbers of 24 bits', 'numbers of 11 bits or fewer', printf('from %.9g to %.9g', low, high), null
from wide
where dtype = 'float32' and field like '%log_prob%' and low < high and high < 0 and isfinite(low) and masked >= 8
    and low * pow(2, 10 - floor(log2(-low))) % 1 = 0 and high * pow(2, 10 - floor(log2(-high))) % 1 = 0
