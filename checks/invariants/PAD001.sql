-- code: PAD001
-- name: padding rows are inert
-- severity: error
-- says: A padding row has mask sum 0, reward 0, a uid of its own, and response content unlike any real row.
-- needs: key, is_padding
-- fields: response_mask
-- examines: select count(*) from base where is_padding
-- subsumed_by:
-- source: S5
-- causes: The batch was filled up with copies of real rows, or the padding kept the mask or the score of the row it was copied from.
-- reports: PrimeIntellect-ai/prime-rl#683, rllm-org/rllm#508, verl-project/verl#5969
-- faults: padding_copies_a_row, padding_joins_a_group, padding_keeps_a_score, padding_keeps_its_mask
with pads as (select b.*, k.key, k.uid from base as b join keys as k using (id) where is_padding),
reals as (
    select step_id, id, group_id, responses_fp, response_len from base where not is_padding
)
select mask_rid as rid, key, 'mask sum 0' as expected, 'mask sum ' || mask_sum as actual, null as detail,
    null as severity
from pads
where mask_sum <> 0
union all
select reward_rid, key, 'reward 0', printf('reward %g', reward), null, null
from pads
where reward <> 0
union all
select coalesce(uid_rid, responses_rid), key, 'a uid of its own', 'the uid of a real group', 'uid ' || uid, null
from pads
where exists (
    select 1 from reals as r
    where r.group_id = pads.group_id and r.step_id = pads.step_id
)
union all
select responses_rid, pads.key, 'content of its own', 'the response of ' || min(k.key), null, null
from pads
join reals as r
    on r.responses_fp = pads.responses_fp and r.response_len = pads.response_len and r.step_id = pads.step_id
join keys as k on k.id = r.id
where pads.response_len > 1
group by responses_rid, pads.key
