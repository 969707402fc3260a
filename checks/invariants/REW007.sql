-- code: REW007
-- name: no reward outside a shrunk mask
-- severity: warning
-- says: After a declared mask shrink no reward sits on a token that was masked since, or the row is marked with a reason.
-- needs: key, mask_sum, nnz_out
-- fields: token_level_rewards, response_mask
-- examines: select sum(n) from events where entity = 'trajectory' and op = 'forward' and field = 'token_level_rewards' and outside is not null
-- subsumed_by: REW005, MSK002
-- backs_up: MSK002: it says what an undeclared rejection does to the baseline, also where a declared one forgot some rows.
-- source: verl's rollout correction shrinks the mask after the score was placed
-- causes: A correction took the last token out of the mask, and the estimator still sums the whole row: the score of a rejected answer moves the baseline of its group.
-- reports: verl-project/verl#6362
-- faults: a_rejection_nobody_is_told_of
create or replace temp table shrunk as
select r.rid, r.step_id
from events as r left join expected using (k)
where r.entity = 'trajectory' and r.op = 'forward' and r.field = 'token_level_rewards' and r.outside > 0
    and r.m is distinct from mask_m;
insert into suspects
select rid from shrunk
union
-- a rejection says which rows it shrank
select rid from events where op = 'forward' and field = 'response_mask' and step_id in (select step_id from shrunk);
with declared as (
    select id from key_cells where reason is not null
    union
    select k.id from elements as e join keys as k using (run, key) where e.reason is not null
)
select e.rid, e.key, 'no reward outside the mask' as expected, e.nnz_out || ' tokens with a reward outside it' as actual,
    printf('the mask shrank from %d to %d tokens, and no reason is recorded', b.mask_sum, e.mask_sum) as detail,
    null as severity
from elements as e
join keys as k using (run, key)
join base as b using (id)
where e.field = 'token_level_rewards' and e.nnz_out > 0 and e.mask_sum < b.mask_sum and not b.is_padding
    and b.id not in (select id from declared)
