-- code: VAL002
-- name: fields have the kind their consumer needs
-- severity: error
-- says: Token ids and positions are integers, masks integers or bools, log-probs, rewards and advantages floating, and the tensors of one batch are on one device.
-- needs: dtype
-- fields:
-- examines: select sum(n) from events where entity = 'trajectory' and dtype is not null and layout <> 'object' and op <> 'compare'
-- subsumed_by:
-- source: LEN002 and MSK001 compare contents whatever their type: a kind is judged here
-- causes: A list of ids or a mask became float by an average, a padding value or a default; a score was kept as an integer; part of a batch stayed on another device.
-- faults: half_a_batch_elsewhere, masks_as_numbers
with kinds(field, kind) as (
    values ('prompts', 'id'), ('responses', 'id'), ('input_ids', 'id'), ('position_ids', 'id'),
        ('attention_mask', 'mask'), ('response_mask', 'mask'), ('loss_mask', 'mask'),
        ('rollout_log_probs', 'float'), ('log_probs', 'float'), ('old_log_probs', 'float'), ('ref_log_prob', 'float'),
        ('entropy', 'float'), ('rm_scores', 'float'), ('token_level_scores', 'float'), ('token_level_rewards', 'float'),
        ('advantages', 'float'), ('returns', 'float'), ('values', 'float'), ('rollout_is_weights', 'float')
),
typed as materialized (
    select rid, field, dtype, kind, case
        when contains(dtype, 'float') then 'float'
        when dtype = 'bool' then 'bool'
        when contains(dtype, 'int') then 'integer'
    end as found
    from events join kinds using (field)
    where entity in ('trajectory', 'request') and op <> 'compare' and layout <> 'object' and n > 0
),
batches as materialized (
    select rid, field, device,
        min(device) over batch as least, max(device) over batch as most, mode(device) over batch as usual
    from events
    where entity = 'trajectory' and device is not null and op <> 'compare' and n > 0 and k is not null
    window batch as (
        partition by step_id, process, stage, op, k, ppo_epoch, mini_batch, micro_batch, container
    )
)
select rid, null as key,
    case kind when 'id' then 'integers' when 'mask' then 'integers or bools' else 'floating' end as expected,
    dtype as actual, field as detail, null as severity
from typed
where (kind = 'id' and found <> 'integer') or (kind = 'mask' and found = 'float') or (kind = 'float' and found <> 'float')
union all
select rid, null, 'on ' || usual || ', as the rest of the batch', 'on ' || device, field, null
from batches
where least <> most and device <> usual
