-- code: BAT003
-- name: micro-batches cover their mini-batch
-- severity: error
-- says: The micro-batches of a mini-batch hold each of its rows exactly once, and what goes through the model is what they hold; so do the micro-batches of a log-prob pass.
-- needs: key, micro_batch
-- fields:
-- examines: select sum(n) from events where op = 'split' and micro_batch is not null
-- subsumed_by: BAT001, KEY006, TOP002
-- source: NeMo-RL's packed shards did not divide; gradient accumulation over fewer rows than the mini-batch has
-- causes: The last short micro-batch was dropped, packing by tokens lost or repeated a row, or a micro-batch was run on another one's rows.
-- reports: verl-project/verl#4776
-- faults: first_micro_batch_again, packed_twice, short_micro_batch_dropped, split_for_padded_fields
create or replace temp table covered as
with rows as (
    select rid, ord, run_id, step_id, stage, op, k, n, ppo_epoch, mini_batch, micro_batch, update_index,
        coalesce(attrs['sub_step'], '') as sub_step, coalesce(coord.dp, -1) as dp
    from events
    where entity = 'trajectory' and k is not null and leads
        and (op = 'split' or (op = 'forward' and field = 'log_probs'))
),
-- `whole` holds what `part` must cover; `one` names the whole
pairs as (
    select 'mini' as what, concat_ws('/', step_id, sub_step, ppo_epoch, mini_batch) as one, micro_batch is null as whole,
        rid, ord, run_id, k, n
    from rows
    where stage = 'update_actor' and op = 'split' and mini_batch is not null
    union all
    select 'forward', concat_ws('/', step_id, update_index, mini_batch, micro_batch, dp), op = 'split', rid, ord, run_id, k, n
    from rows
    where stage = 'update_actor' and micro_batch is not null and update_index is not null
    union all
    select 'pass', concat_ws('/', step_id, stage), op = 'forward', rid, ord, run_id, k, n
    from rows
    where stage in ('old_log_prob', 'ref_log_prob') and (op = 'forward' or micro_batch is not null)
)
select *, cast(sum(k) filter (whole) over same % 18446744073709551616 as ubigint) as whole_k,
    cast(sum(k) filter (not whole) over same % 18446744073709551616 as ubigint) as part_k,
    -- a run that records no micro-batches, or no forward pass of them, says nothing of any
    what <> 'pass' and bool_or(not whole) over (partition by what, run_id) as told
from pairs
window same as (partition by what, one);
with doubtful as (
    select what, one, max_by(rid, ord) filter (not whole) as part_rid, max_by(rid, ord) filter (whole) as whole_rid
    from covered
    group by what, one
    having any_value(whole_k) is distinct from any_value(part_k) and count(*) filter (whole) > 0
        and (count(*) filter (not whole) > 0 or any_value(told))
),
counted as (
    select what, one, part_rid, whole_rid, id,
        count(*) filter (whole) as wanted, count(*) filter (not whole) as found,
        max_by(rid, ord) filter (not whole) as rid
    from doubtful join covered using (what, one) join keyed using (k)
    group by all
)
select coalesce(case when found > wanted then rid end, part_rid, whole_rid) as rid, key,
    printf('%d times', wanted) as expected, printf('%d times', found) as actual,
    case what
        when 'mini' then 'in the micro-batches of its mini-batch'
        when 'forward' then 'in the forward pass of its micro-batch'
        else 'in the micro-batches of the pass'
    end as detail,
    null as severity
from counted join keys using (id)
where wanted <> found
