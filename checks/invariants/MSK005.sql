-- code: MSK005
-- name: every row trains something
-- severity: warning
-- says: A real row that trains has policy_len > 0 unless a reason is recorded, and the mask sum of a mini-batch is > 0.
-- needs: key, mask_sum
-- fields: response_mask
-- examines: select sum(n) from events where stage = 'update_actor' and field in ('loss_mask', 'response_mask', 'log_probs') and op in ('consume', 'forward') and masked is not null
-- subsumed_by: MSK001, MSK002, MSK003, MSK004
-- source: S4; masked means over nothing
-- causes: An empty or excluded answer was kept as a row: it takes a place in its group and its mini-batch and trains nothing.
-- reports: NVIDIA-NeMo/RL#4001, verl-project/verl#782
-- faults: empty_answers_kept
with empty as (
    select id from base
    where mask_sum = 0 and not is_padding and id not in (select id from key_cells where reason is not null)
)
select arg_min(e.rid, e.ord) as rid, key, 'policy_len > 0, or a reason' as expected, 'policy_len 0' as actual, null as detail,
    null as severity
from (select * from events where stage = 'update_actor' and op = 'consume' and field in ('loss_mask', 'response_mask')) as e
join (select * from keyed where id in (select id from empty)) as k using (k)
join keys using (id)
group by e.step_id, key
union all
select arg_min(rid, ord), null, 'mask sum > 0', '0 over ' || sum(n) || ' rows', 'mini-batch ' || any_value(mini_batch), null
from events
where stage = 'update_actor' and op = 'forward' and field = 'log_probs' and masked is not null
group by step_id, coalesce(attrs['sub_step'], ''), update_index, ppo_epoch, mini_batch
having sum(masked) = 0
