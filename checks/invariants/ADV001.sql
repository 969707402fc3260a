-- code: ADV001
-- name: advantages stay under the mask
-- severity: error
-- says: Per-token advantages and returns are 0 outside the final mask.
-- needs: key, nnz_out
-- fields: advantages
-- examines: select sum(n) from events where entity = 'trajectory' and field in ('advantages', 'returns') and outside is not null
-- subsumed_by: MSK002, REW001, VAL001, ADV002
-- source: S10
-- causes: The group-relative score was broadcast over the response without the mask, or multiplied by an attention mask.
-- reports: areal-project/AReaL#1346
-- faults: advantages_not_masked, rejected_tokens_keep_an_advantage, returns_not_masked
insert into suspects
select rid
from events
where entity = 'trajectory' and field in ('advantages', 'returns') and op <> 'compare' and outside > 0;
select rid, key, '0 outside the mask' as expected,
    printf('%d tokens outside are not zero (greatest %s)', nnz_out, coalesce(printf('%g', max_abs_out), 'not a number')) as actual,
    printf('mask sum %d of %d', mask_sum, length) as detail, null as severity
from elements
where nnz_out > 0
