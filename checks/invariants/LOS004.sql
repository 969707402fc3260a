-- code: LOS004
-- name: every term reaches the gradient
-- severity: error
-- says: The policy loss of a token carries a gradient, and where use_kl_loss is on so does the KL to the reference, which is not 0 where the log-probs are apart by more than the band (a warning of the KL). On every micro-batch the ledger has the terms that the configuration asks for and no other, each with its coefficient and sign.
-- needs: loss
-- fields: loss
-- examines: select count(*) from events where (loss is not null and update_index is not null) or (stage = 'update_actor' and op = 'forward' and field in ('pg_loss', 'kl_loss') and requires_grad is not null)
-- subsumed_by: LGP006, LGP001, LOS003
-- source: KL in the loss is there for its gradient; detached estimators, a reference that follows the actor
-- causes: The KL was taken under no_grad, of detached log-probs, or against a reference that is the actor; its coefficient was lost on the way; a bonus is added where it is to be taken off, or by a coefficient of another run.
-- faults: entropy_bonus_is_a_penalty, entropy_bonus_never_arrives, kl_coefficient_of_another_run, kl_nobody_asked_for, kl_pushes_away_from_the_reference, kl_without_gradient, policy_loss_at_half_its_weight, policy_loss_without_gradient
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
create or replace temp table asked_terms as
with asked as (
    -- a loop of one's own that says nothing of its loss may have any term
    select run_id, said('loss.whole') = 1 and setting(run_id, 'actor_rollout_ref.actor.use_kl_loss') is not null as whole,
        -try_cast(setting(run_id, 'actor_rollout_ref.actor.entropy_coeff') as double) + 0 as entropy,
        case setting(run_id, 'actor_rollout_ref.actor.use_kl_loss')
            when 'true' then try_cast(setting(run_id, 'actor_rollout_ref.actor.kl_loss_coef') as double)
            when 'false' then 0
        end as kl
    from (select distinct run_id from events where loss is not null)
)
select run_id, whole, unnest([
    {term: 'pg_loss', coefficient: case when whole then 1.0 end},
    {term: 'entropy_loss', coefficient: entropy},
    {term: 'kl_loss', coefficient: kl}
], recursive := true)
from asked;
create or replace temp table terms_seen as
select run_id, process, global_steps, update_index, micro_batch, coord.dp as dp, min(rid) as rid,
    list(distinct loss.term) as terms
from events
where loss is not null
group by all;
select rid, null as key, 'a gradient' as expected, 'none' as actual, field || ' is a constant' as detail,
    case when field = 'kl_loss' then 'warning' end as severity
from events
where stage = 'update_actor' and op = 'forward' and field in ('pg_loss', 'kl_loss') and requires_grad = false
union all
select s.rid, a.term, printf('a term of coefficient %g', a.coefficient), 'none in the ledger', null,
    -- who keeps no whole ledger may have left it out of the trace alone
    case when not a.whole and not exists (
        select 1 from terms_seen as o where o.run_id is not distinct from s.run_id and list_contains(o.terms, a.term)
    ) then 'warning' end
from terms_seen as s join asked_terms as a on a.run_id is not distinct from s.run_id
where a.coefficient <> 0 and not list_contains(s.terms, a.term)
union all
select e.rid, a.term, printf('coefficient %g', a.coefficient), printf('%g', e.loss.scale),
    case when e.loss.scale = -a.coefficient then 'the other sign' end, null
from events as e join asked_terms as a on a.run_id is not distinct from e.run_id and a.term = e.loss.term
-- an entropy is not below 0 but for rounding: a bonus whose numerators are has its sign there
where abs(e.loss.scale * if(a.term = 'entropy_loss' and e.loss.numerator < -1e-5 * e.loss.tokens, -1, 1) - a.coefficient)
    > 1e-6 * abs(a.coefficient)
union all
select e.rid, e.loss.term, 'no such term', printf('coefficient %g', e.loss.scale), null, null
from events as e join (select distinct run_id from asked_terms where whole) as r on r.run_id is not distinct from e.run_id
where e.loss is not null and e.loss.term not in ('pg_loss', 'entropy_loss', 'kl_loss') and e.loss.scale <> 0
union all
select e.rid, 'kl_loss', 'a KL that is not 0', '0', printf('log-probs %.3g nats from the reference''s, %d tokens', g.gap, e.loss.tokens), 'warning'
from events as e
join kl_runs as r on r.run_id is not distinct from e.run_id
join kl_gaps as g using (rid)
where g.gap > band(e.run_id)
