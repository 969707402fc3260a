-- code: QUE004
-- name: a get returns what was asked for
-- severity: error
-- says: A get returns every key and every field asked for; what the queue does not have it leaves out without a word.
-- needs: asked_n
-- fields:
-- examines: select sum(asked_n) from events where op = 'consume' and asked_n is not null
-- subsumed_by: QUE001
-- source: TransferQueue drops missing keys, and a field that one row lacks, silently
-- causes: Keys were cleared while somebody still read them, a row was written without one of its fields, or the stage that writes it has not run.
-- reports: Ascend/TransferQueue#160, meta-pytorch/torchforge#601
-- faults: cleared_while_it_is_read, weights_nobody_computed
with short as (
    select rid, field, asked_n, n, missing, entity,
        n = 0 and len(coalesce(missing, [])) = 0 as no_field
    from events
    where op = 'consume' and asked_n is not null and (n <> asked_n or len(coalesce(missing, [])) > 0)
)
select rid, unnest(missing) as key, 'a row of ' || field as expected, 'nothing' as actual,
    'the queue does not know this key' as detail, null as severity
from short where len(coalesce(missing, [])) > 0
union all
select rid, null, asked_n || ' rows of ' || field, n || ' rows',
    case
        when no_field then 'some row lacks the field, so no row has it'
        when n > asked_n then 'more than was asked for'
        else 'fewer than was asked for'
    end,
    null
from short where len(coalesce(missing, [])) = 0
