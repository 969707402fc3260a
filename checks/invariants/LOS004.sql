-- code: LOS004
-- name: every term reaches the gradient
-- severity: error
-- says: The policy loss of a token carries a gradient, and where use_kl_loss is on so does the KL to the reference: it is in the ledger with its coefficient, and no longer 0 once the weights have moved. A warning of the KL.
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
create or replace temp table moved_at as
select run_id, min(ord) as ord
from events
where op = 'optim_step' and optim.lr > 0 and optim.grad_norm > 0 and not coalesce(optim.skipped, false)
group by run_id;
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
select e.rid, 'kl_loss', 'a KL that is not 0', '0', printf('%d tokens, after the first update', e.loss.tokens), 'warning'
from events as e
join kl_runs as r on r.run_id is not distinct from e.run_id
join moved_at as m on m.run_id is not distinct from e.run_id
where e.loss.term = 'kl_loss' and e.loss.numerator = 0 and e.loss.tokens >= 8 and e.ord > m.ord
