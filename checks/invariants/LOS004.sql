-- code: LOS004
-- name: every term reaches the gradient
-- severity: error
-- says: The policy loss of a token carries a gradient, and where use_kl_loss is on so does the KL to the reference: it is in the ledger with its coefficient, and not 0 where the log-probs are apart by more than the band. A warning of the KL.
-- needs: loss
-- fields: loss
-- examines: select count(*) from events where (loss is not null and update_index is not null) or (stage = 'update_actor' and op = 'forward' and field in ('pg_loss', 'kl_loss') and requires_grad is not null)
-- subsumed_by: LGP006, LGP001, LOS003
-- source: KL in the loss is there for its gradient; detached estimators, a reference that follows the actor
-- causes: The KL was taken under no_grad, of detached log-probs, or against a reference that is the actor; its coefficient was lost on the way.
-- faults: kl_without_gradient, policy_loss_without_gradient
create or replace temp table kl_runs as
select run_id, try_cast(setting(run_id, 'actor_rollout_ref.actor.kl_loss_coef') as double) as coef
from (select distinct run_id from events where loss is not null)
where setting(run_id, 'actor_rollout_ref.actor.use_kl_loss') = 'true';
create or replace temp table kl_gaps as
-- how far, in the mean or on one token, the log-probs of a row must be from the reference's: by the sums of both, and by
-- how far each is from the old ones
select k.rid, max(greatest(
    abs(n.sum_in - r.sum_in) / n.mask_sum, abs(p.absdiff_sum - q.absdiff_sum) / n.mask_sum, abs(p.absdiff_max - q.absdiff_max)
)) as gap
from (select * from events where loss.term = 'kl_loss' and loss.numerator = 0 and loss.tokens > 0) as k
join events as f
    on f.run_id is not distinct from k.run_id and f.process is not distinct from k.process
    and f.global_steps = k.global_steps and f.update_index = k.update_index
    and f.micro_batch is not distinct from k.micro_batch and f.coord.dp is not distinct from k.coord.dp
join token_sum_cells as n on n.rid = f.rid
join token_sum_cells as r
    on r.step_id = n.step_id and r.id = n.id and r.field = 'ref_log_prob' and r.op = 'produce' and r.mask_sum = n.mask_sum
left join events as c
    on c.op = 'compare' and c.field = 'log_probs' and c.against = 'old_log_probs' and c.run_id is not distinct from f.run_id
    and c.process is not distinct from f.process and c.global_steps = f.global_steps and c.update_index = f.update_index
    and c.micro_batch is not distinct from f.micro_batch and c.coord.dp is not distinct from f.coord.dp
left join pair_cells as p on p.rid = c.rid and p.id = n.id and p.n_in = n.mask_sum
left join pair_cells as q
    on q.step_id = n.step_id and q.id = n.id and q.field = 'ref_log_prob' and q.against = 'old_log_probs'
    and q.n_in = n.mask_sum
where f.field = 'log_probs' and f.op = 'forward' and f.stage = 'update_actor' and n.mask_sum > 0
group by k.rid;
select rid, null as key, 'a gradient' as expected, 'none' as actual, field || ' is a constant' as detail,
    case when field = 'kl_loss' then 'warning' end as severity
from events
where stage = 'update_actor' and op = 'forward' and field in ('pg_loss', 'kl_loss') and requires_grad = false
union all
select min(e.rid), 'kl_loss', printf('a KL term of coefficient %g', r.coef), 'none in the ledger', null, 'warning'
from events as e join kl_runs as r on r.run_id is not distinct from e.run_id
where e.loss is not null and r.coef > 0
group by e.run_id, e.global_steps, r.coef
having not bool_or(e.loss.term = 'kl_loss')
union all
select e.rid, 'kl_loss', printf('coefficient %g', r.coef), printf('%g', e.loss.scale), null, 'warning'
from events as e join kl_runs as r on r.run_id is not distinct from e.run_id
where e.loss.term = 'kl_loss' and abs(e.loss.scale - r.coef) > 1e-6 * abs(r.coef)
union all
select e.rid, 'kl_loss', 'a KL that is not 0', '0', printf('log-probs %.3g nats from the reference''s, %d tokens', g.gap, e.loss.tokens), 'warning'
from events as e
join kl_runs as r on r.run_id is not distinct from e.run_id
join kl_gaps as g using (rid)
where g.gap > band(e.run_id)
