-- code: MSK003
-- name: the mask is that of the turns
-- severity: error
-- says: response_mask is 1 on the policy's turns and 0 on observations and inserted tokens: policy_len = response_len less these.
-- needs: key, turn, start, role, fingerprint, mask_sum
-- fields: response_mask, turns
-- examines: select count(*) from ribbons join base using (id) where ribbons.seq_len = base.prompt_len + response_len and mask_len = response_len and base.mask_fp is not null and coalesce(loss_fp, base.mask_fp) = base.mask_fp
-- subsumed_by: MSK001, MSK004, LEN001
-- source: 04 Agent Loop: policy tokens have mask 1, observations mask 0
-- causes: The mask was made by message or by counting instead of by who wrote each token: template tokens of the policy's turn, the tool's answer, or a mask cut from the wrong side.
-- reports: NovaSky-AI/SkyRL#710, PrimeIntellect-ai/verifiers#11, THUDM/slime#1350, THUDM/slime#330
-- faults: mask_of_the_last_ones, mask_off_by_the_header, observations_train, only_the_last_turn_trains, template_tokens_train
select b.mask_rid as rid, key,
    printf('%d policy tokens in %d turns', r.policy_len, r.policy_turns) as expected,
    printf('mask sum %d of %d tokens, fingerprint %x', b.mask_sum, b.response_len, b.mask_fp) as actual,
    case
        when b.mask_sum = r.policy_len then 'as many as the policy wrote, at other places'
        when b.mask_sum > r.policy_len then 'tokens train that the policy did not write'
        else 'tokens of the policy do not train'
    end as detail,
    null as severity
from ribbons as r join base as b using (id) join keys using (id)
where r.seq_len = b.prompt_len + b.response_len and b.mask_len = b.response_len
    and compose(0, b.prompt_len, b.mask_fp) <> r.mask_fp
    -- of two masks that differ nobody knows which one is meant (MSK001)
    and coalesce(b.loss_fp, b.mask_fp) = b.mask_fp
    and (b.mask_sum >= r.policy_len or id not in (select id from key_cells where reason is not null))
