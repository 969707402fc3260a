-- code: MSK006
-- name: what the engine counted
-- severity: error
-- says: policy_len is the number of tokens the engine reports as generated, less declared cuts, and the turns of a trajectory add up to prompt_len + response_len.
-- needs: key, generated, mask_sum, is_padding
-- fields: response_mask
-- examines: select count(*) from base left join ribbons as r using (id) left join tag_cells as t using (id) where not is_padding and (r.counted > 0 or t.generated is not null)
-- subsumed_by: MSK001, MSK003, MSK004, LEN001
-- source: 04 Agent Loop: what is trained is what was generated
-- causes: An answer was cut to the limit without saying so, or a valid length was derived from token values when the engine had said it: what follows the stop is trained, or what was generated is not.
-- reports: PrimeIntellect-ai/prime-rl#855, verl-project/verl#213, verl-project/verl#7207
-- faults: answers_cut_in_silence, flags_by_turn, only_the_last_turn_is_counted, tokens_after_the_stop, turns_lose_their_calls
with judged as (
    select b.*, r.rid as turns_rid, r.seq_len as turns_len, r.policy_len, r.cut, r.policy_turns,
        case when r.counted = r.policy_turns then r.generated end as counted, t.rid as tag_rid, t.generated
    from base as b
    left join ribbons as r using (id)
    left join tag_cells as t using (id)
    where not b.is_padding and b.mask_len = b.response_len
)
select turns_rid as rid, key, printf('%d + %d tokens', prompt_len, response_len) as expected,
    turns_len || ' in its turns' as actual, 'tokens without a turn' as detail, null as severity
from judged join keys using (id)
where turns_len <> prompt_len + response_len
union all
select turns_rid, key, printf('%d tokens: %d generated, %d cut', counted - cut, counted, cut),
    printf('%d in %d policy turns', policy_len, policy_turns), null, null
from judged join keys using (id)
where turns_len = prompt_len + response_len and policy_len + cut <> counted
union all
select coalesce(tag_rid, mask_rid), key, printf('%d generated', coalesce(counted, generated)), printf('%d %s', case when counted is null then mask_sum else generated end, case when counted is null then 'under the mask' else 'by the tag' end), null, null
from judged join keys using (id)
where generated <> counted
    or (turns_rid is null and (mask_sum > generated
        or (mask_sum < generated and id not in (select id from key_cells where reason is not null))))
