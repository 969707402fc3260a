-- code: MSK001
-- name: the mask is a mask
-- severity: error
-- says: response_mask is 0/1, loss_mask is the rollout's response_mask, and policy_len <= response_len.
-- needs: key, mask_sum
-- fields: response_mask
-- examines: select sum(n) from events where entity = 'trajectory' and op = 'produce' and field in ('response_mask', 'loss_mask')
-- subsumed_by: LEN001
-- backs_up: MSK002: it says at the rollout what MSK002 says where a consumer reads the mask.
-- source: S4
-- causes: The loss mask was built from token ids or attention instead of taken from the rollout, or observation tokens were left at 1 in one of the two.
-- reports: huggingface/trl#4976
-- faults: loss_mask_by_token, mask_numbers_the_turns, truncated_rows_in_one_mask
with masks as (select b.*, e.dtype as mask_dtype from base as b left join events as e on e.rid = b.mask_rid)
select mask_rid as rid, key, '0 or 1' as expected,
    printf('%d elements are not zero, they sum to %g', mask_sum, mask_added) as actual,
    'response_mask' as detail, null as severity
from masks join keys using (id)
where mask_added <> mask_sum
    or ((mask_dtype like '%int%' or mask_dtype like '%bool%') and mask_content <> mask_fp)
union all
select mask_rid, key, 'policy_len <= ' || response_len, 'policy_len ' || mask_sum, null, null
from masks join keys using (id)
where mask_sum > least(mask_len, response_len)
union all
select loss_rid, key, printf('sum %d over %d tokens, fingerprint %x', mask_sum, mask_len, mask_fp),
    printf('sum %d over %d tokens, fingerprint %x', loss_sum, loss_len, loss_fp),
    case when loss_sum = mask_sum then 'same sum, other positions' end, null
from masks join keys using (id)
where loss_sum <> mask_sum or loss_len <> mask_len or loss_fp <> mask_fp
