-- code: LOS002
-- name: every token weighs once
-- severity: error
-- says: The tokens of each term are those of the final mask, on every micro-batch and over an epoch; no token weighs more than its share; what the backward pass begins with is the sum of the terms, as they are scaled; and the gradient begins empty at every mini-batch and goes on, as it is, from one micro-batch to the next.
-- needs: loss, seq
-- fields: loss
-- examines: select count(*) from events where loss is not null and update_index is not null
-- subsumed_by: LOS001, MSK001, MSK002, BAT003, KEY006, QUE003
-- source: verl's agg_loss; losses scaled by the context-parallel size, by micro-batches or by ranks seen in SkyRL and slime
-- causes: A term kept its own mask, or none; the loss was scaled once more for ranks, gradient accumulation or a scheduler; a micro-batch was left out; gradients were not zeroed before a mini-batch, or were between its micro-batches.
-- reports: NVIDIA-NeMo/RL#3791, NovaSky-AI/SkyRL#1751, THUDM/slime#987, allenai/open-instruct#535
-- faults: entropy_bonus_times_micro_batches, gradient_is_averaged_as_it_grows, gradients_are_never_zeroed, kl_logged_and_not_added, kl_over_everything, last_micro_batch_is_the_gradient, last_micro_batch_weighs_half, loss_times_the_ranks
create or replace temp table micro_terms as
select rid, run_id, process, global_steps, ppo_epoch, update_index, micro_batch, coord.dp as dp, ord,
    loss.term as term, loss.mode as mode, loss.tokens as tokens, loss.numerator as numerator,
    loss.denominator as denominator, loss.scale * loss.numerator / loss.denominator as share,
    try_cast(attrs['backward'] as double) as backward, try_cast(attrs['gradient_before'] as double) as before,
    try_cast(attrs['gradient_after'] as double) as after
from events
where loss is not null and update_index is not null;
create or replace temp table micro_masks as
select run_id, process, global_steps, update_index, micro_batch, coord.dp as dp,
    max(masked) filter (field = 'log_probs') as whole, max(masked) filter (field = 'response_mask') as kept
from events
where stage = 'update_actor' and op = 'forward' and field in ('log_probs', 'response_mask') and masked is not null
group by all;
create or replace temp table epochs as
with parts as (
    select run_id, global_steps, ppo_epoch, attrs['sub_step'] as sub_step, sum(k) % 18446744073709551616 as k,
        list(update_index) as updates
    from events
    where stage = 'update_actor' and op = 'split' and micro_batch is null
    group by run_id, global_steps, ppo_epoch, attrs['sub_step']
),
masks as (
    -- what was read last decides: the rollout correction rewrites response_mask alone
    select run_id, global_steps, k, arg_max(masked, field = 'response_mask') as masked
    from events
    where stage = 'update_actor' and op = 'consume' and field in ('loss_mask', 'response_mask') and masked is not null
    group by run_id, global_steps, k
)
select p.run_id, p.global_steps, p.ppo_epoch, unnest(p.updates) as update_index, p.sub_step, m.masked
from parts as p
join masks as m on m.run_id is not distinct from p.run_id and m.global_steps = p.global_steps and m.k = p.k;
with beside as (
    select t.*, case when t.term = 'pg_loss' then coalesce(m.kept, m.whole) else m.whole end as masked
    from micro_terms as t
    join micro_masks as m
        on m.run_id is not distinct from t.run_id and m.process is not distinct from t.process
        and m.global_steps = t.global_steps and m.update_index = t.update_index
        and m.micro_batch is not distinct from t.micro_batch and m.dp is not distinct from t.dp
),
summed as (
    select t.run_id, t.global_steps, t.ppo_epoch, e.sub_step, t.term, arg_max(t.rid, t.ord) as rid, sum(t.tokens) as tokens,
        any_value(e.masked) as masked
    from micro_terms as t
    join epochs as e
        on e.run_id is not distinct from t.run_id and e.global_steps = t.global_steps
        and e.ppo_epoch is not distinct from t.ppo_epoch and e.update_index = t.update_index
    group by t.run_id, t.global_steps, t.ppo_epoch, e.sub_step, t.term
),
weighed as (
    -- of a mean over rows LOS001 says it: a micro-batch counts rows that train nothing
    select arg_max(rid, ord) as rid, term, update_index, sum(tokens / denominator) as weight
    from micro_terms
    where mode in ('token-mean', 'dapo', 'cispo', 'vespo')
    group by run_id, global_steps, update_index, term
),
passed as (
    select min(rid) as rid, any_value(backward) as backward, sum(share) as whole, sum(abs(share)) as size
    from micro_terms
    where backward is not null
    group by run_id, process, global_steps, update_index, micro_batch, dp
),
gradients as (
    select *, lag(after) over (partition by run_id, process, global_steps, update_index order by ord) as left_before
    from (
        select run_id, process, global_steps, update_index, min(rid) as rid, min(ord) as ord, any_value(before) as before,
            any_value(after) as after
        from micro_terms
        where before is not null
        group by run_id, process, global_steps, update_index, micro_batch, dp
    )
)
select rid, term as key, printf('%d tokens, the mask''s', masked) as expected, printf('%d tokens', tokens) as actual,
    printf('micro-batch %d of optimiser step %d', micro_batch, update_index) as detail, null as severity
from beside
where tokens <> masked
union all
select rid, term, printf('%d tokens, the final mask''s', masked), printf('%d tokens', cast(tokens as bigint)),
    printf('over epoch %d', ppo_epoch), null
from summed
where tokens <> masked
    -- in bypass mode the policy gradient rejects on its own
    and not (term = 'pg_loss' and tokens < masked and exists (
        select 1 from micro_masks as m
        where m.kept is not null and m.run_id is not distinct from summed.run_id and m.global_steps = summed.global_steps
    ))
union all
select rid, term, 'weights that sum to 1 at most', printf('%.6g', weight), printf('optimiser step %d', update_index), null
from weighed
where weight > 1 + 1e-6
union all
select rid, 'loss', printf('%.9g, the sum of its terms', whole), printf('%.9g', backward),
    case when whole <> 0 then printf('%.6g times as much', backward / whole) end, null
from passed
where abs(backward - whole) > said('loss.backward') * size + 1e-12 and not isnan(whole)
union all
select rid, 'gradient', coalesce(printf('%.9g, as the micro-batch before left it', left_before), '0: it begins empty'),
    printf('%.9g', before),
    case
        when left_before is null then 'something is left of the update before'
        when before = 0 then 'what was added so far is lost'
        else 'it was changed in between'
    end,
    null
from gradients
where before <> coalesce(left_before, 0)
