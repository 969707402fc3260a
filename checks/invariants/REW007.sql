-- code: REW007
-- name: no reward outside a shrunk mask
-- severity: warning
-- says: After a declared mask shrink no reward sits on a token that was masked since, or the row is marked with a reason.
-- needs: key, mask_sum, nnz_out
-- fields: token_level_rewards, response_mask
-- examines: select sum(n) from events where entity = 'trajectory' and op = 'forward' and field = 'token_level_rewards' and outside is not null
-- subsumed_by: REW005, MSK002
-- source: verl's rollout correction shrinks the mask after the score was placed
-- causes: A correction took the last token out of the mask, and the estimator still sums the whole row: the score of a rejected answer moves the baseline of its group.
insert into suspects
select r.rid
from events as r left join expected using (k)
where r.entity = 'trajectory' and r.op = 'forward' and r.field = 'token_level_rewards' and r.outside > 0
    and r.m is distinct from mask_m;
with declared as (
    select id from key_cells where reason is not null
    union
    select k.id from elements as e join keys as k using (key) where e.reason is not null
)
select 1
