-- code: LEN007
-- name: fields keep their form
-- severity: warning
-- says: Layout, dtype and rank of a field are, at one place of the step, what they were in the step before.
-- needs: layout, dtype, shape
-- fields:
-- examines: select count(*) from (select step_id, lag(step_id) over (partition by scope, stage, op, field, producer, consumer, container, span order by step_id) as before from events where entity = 'trajectory' and n > 0 and layout is not null and span in ('prompt', 'response', 'sequence')) where before < step_id
-- subsumed_by:
-- source: the field registry: a field's layout and dtype do not depend on the batch
-- causes: A batch in which no row had something was padded or typed otherwise: an empty list became float32, a jagged tensor of equal rows became dense.
-- faults: equal_rows_go_dense, scores_in_double
with forms as (
    select scope, stage, op, field, producer, consumer, container, span, step_id, min(ord) as ord, arg_min(rid, ord) as rid,
        string_agg(distinct printf('%s %s, rank %d', layout, dtype, len(shape)), ' or ' order by printf('%s %s, rank %d', layout, dtype, len(shape))) as form
    from events
    where entity = 'trajectory' and n > 0 and layout is not null and span in ('prompt', 'response', 'sequence')
    group by all
),
told as (
    select *, lag(form) over (partition by scope, stage, op, field, producer, consumer, container, span order by step_id) as before
    from forms
)
select rid, null as key, before as expected, form as actual, 'as in the step before' as detail, null as severity
from told
where form <> before
