-- code: MSK002
-- name: consumers use the rollout's mask
-- severity: error
-- says: The mask a consumer uses is the rollout's, or a declared subset of it (rejection, truncation masking), never a superset.
-- needs: key, mask_sum
-- fields: response_mask
-- examines: select sum(n) from events where entity = 'trajectory' and span = 'response' and m is not null and op <> 'compare'
-- subsumed_by: MSK001, QUE003, LEN001, LEN003
-- source: S4; verl's rollout correction rewrites response_mask and leaves loss_mask
-- causes: The mask was rebuilt downstream, from attention or from pad ids, instead of read; or shifted by one against the tokens.
-- reports: rllm-org/rllm#517, unslothai/unsloth#4149, unslothai/unsloth#5673, verl-project/verl#2513, verl-project/verl#6362
-- faults: a_rejection_nobody_is_told_of, advantages_for_a_mask, everything_trains, mask_of_another_micro_batch, mask_of_the_token_before, mask_rebuilt_in_the_update, rejection_begins_with_all_tokens
insert into suspects
select rid
from events left join expected using (k)
where entity = 'trajectory' and span = 'response' and op <> 'compare' and m is not null and m is distinct from mask_m;
with declared as (
    select id from key_cells where reason is not null
    union
    select id from elements join keys using (run, key) where reason is not null
)
select e.rid, e.key, printf('mask sum %d, fingerprint %x', b.mask_sum, b.mask_fp) as expected, printf('mask sum %d, fingerprint %x', e.mask_sum, e.mask_fingerprint) as actual,
    case
        when e.mask_sum = b.mask_sum then 'same sum, other positions'
        when e.mask_sum > b.mask_sum then 'a superset of the rollout''s mask'
        else 'smaller, and no reason is recorded'
    end as detail,
    null as severity
from elements as e
join keys using (run, key)
join base as b using (id)
where (e.mask_sum <> b.mask_sum or e.mask_fingerprint <> b.mask_fp) and e.valid_length = b.mask_len
    and (e.mask_sum >= b.mask_sum or id not in (select id from declared))
union all
select loss.rid, null, 'one mask', 'two', 'loss_mask and response_mask of this update differ: numerator and denominator disagree',
    'warning'
from events as loss
join events as response
    on loss.run_id is not distinct from response.run_id and loss.global_steps = response.global_steps
    and loss.stage = response.stage and loss.op = response.op and loss.k = response.k
where loss.stage = 'update_actor' and loss.field = 'loss_mask' and response.field = 'response_mask'
    and loss.op = 'consume' and loss.m <> response.m
