-- code: VAL001
-- name: values are finite
-- severity: error
-- says: No value at a valid position is NaN or infinite, and none leaks from a masked position into a loss or a metric.
-- needs: nonfinite_in
-- fields:
-- examines: select sum(n) from events where nonfinite_in is not null and op <> 'compare'
-- subsumed_by: REW001, LGP001
-- source: NaN times a mask of 0 is NaN
-- causes: A division by an empty count, a log of 0, a reward that was never computed; or a masked value multiplied by its mask instead of left out.
-- reports: NovaSky-AI/SkyRL#1633, alibaba/ROLL@370cb24c
-- faults: deviation_of_zero, entropy_of_a_certain_token, masked_by_product, the_deviation_of_one
insert into suspects
select rid from events where nonfinite_in > 0 and op <> 'compare';
create or replace temp table hidden as
-- a value nobody may use: not finite, and masked
select step_id, max_by(field, ord) as field, max_by(stage, ord) as stage, min(ord) as ord
from events
where entity = 'trajectory' and nonfinite > coalesce(nonfinite_in, 0) and op <> 'compare'
group by step_id;
create or replace temp table spoilt as
select e.rid, e.ord, e.step_id, e.loss.term as term, e.loss.numerator as value
from events as e
where e.loss is not null and not isfinite(e.loss.numerator);
select rid, key, 'finite values' as expected, printf('%d NaN or infinite', nonfinite_in) as actual,
    case when entity = 'trajectory' and mask_sum is not null then 'under the mask' end as detail,
    -- a metric may be undefined, such as a mean over nothing
    case when entity = 'metric' and not leaks then 'warning' end as severity
from (
    select e.*, coalesce(h.ord < v.ord, false) as leaks
    from elements as e join events as v using (rid) left join hidden as h on h.step_id = v.step_id
    where e.nonfinite_in > 0
)
union all
select s.rid, null, 'a finite ' || s.term, printf('%g', s.value),
    printf('%s of %s is not finite where it is masked', h.field, h.stage), null
from spoilt as s join hidden as h on h.step_id = s.step_id and h.ord < s.ord
where not exists (
    select 1 from events as v
    where v.step_id = s.step_id and v.entity = 'trajectory' and v.nonfinite_in > 0 and v.ord < s.ord
)
