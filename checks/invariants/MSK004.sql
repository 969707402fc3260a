-- code: MSK004
-- name: the token that stops trains
-- severity: error
-- says: Where finish_reason is stop, response_mask is 1 at the last token the policy generated.
-- needs: key, mask_sum, finish_reason, last_nnz
-- fields: response_mask
-- examines: select count(*) from base join tag_cells as t using (id) left join ribbons as r using (id) where finish_reason = 'stop' and not is_padding and (r.policy_end is not null or t.generated = response_len)
-- subsumed_by: MSK001, LEN001
-- backs_up: MSK003: it needs no turns, and names what a mask made from token ids does
-- source: S4; the mask of a trainer whose padding token is its eos token
-- causes: The mask was made as ids != pad with pad = eos, or an answer was taken for a truncated one by its last token: the policy never learns to stop.
-- reports: NovaSky-AI/SkyRL#1319, alibaba/ROLL@1f9d2171
-- faults: finished_answers_filtered, stop_token_taken_for_padding
with ended as (
    select b.*, t.finish_reason,
        case
            when r.seq_len = b.prompt_len + b.response_len then r.policy_end - b.prompt_len
            when r.id is null and t.generated = b.response_len then b.response_len
        end as policy_end
    from base as b
    join (select distinct id, finish_reason, generated from tag_cells where finish_reason = 'stop') as t using (id)
    left join ribbons as r using (id)
    where not b.is_padding and b.mask_len = b.response_len
)
select mask_rid as rid, key, printf('mask 1 at token %d, the last generated', policy_end - 1) as expected,
    case when mask_sum = 0 then 'mask 0 everywhere' else printf('mask 0: the last 1 is at token %d', mask_last) end as actual,
    null as detail, null as severity
from ended join keys using (id)
where coalesce(loss_fp, mask_fp) = mask_fp and (mask_sum = 0 or mask_last < policy_end - 1) and policy_end > 0
    and id not in (select id from key_cells where reason is not null)
