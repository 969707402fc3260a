-- code: LGP006
-- name: the reference stays the first policy
-- severity: error
-- says: The reference's weights do not change; in the first step of a fresh run its log-probs are the old ones within the band; once the actor's weights have changed they are not the old ones bit for bit, on tokens whose log-probs are not all but 0.
-- needs: key
-- fields: ref_log_prob
-- examines: select count(*) from events where (entity = 'param' and weights.phase = 'ref' and c is not null) or (op = 'compare' and field = 'ref_log_prob')
-- subsumed_by: LGP001, LGP003, LGP005, LEN004, QUE003
-- source: seen in TRL: a reference that is the bare base model; verl's ref_in_actor with the adapter left on
-- causes: The reference shares tensors with the actor, is synchronised with it, or is the actor with its adapter left on; or it was never the policy the run began with.
-- reports: huggingface/trl#3194, vllm-project/vllm#51594
-- faults: adapter_left_on, reference_is_synchronised, reference_is_the_base_model, reference_without_its_head
create or replace temp table reference_rows as
select rid, run_id, c, ord,
    lag(c) over (partition by run_id, process, stage, op, field, n order by ord) as before
from events
where entity = 'param' and weights.phase = 'ref' and c is not null;
create or replace temp table actor_syncs as
select run_id, ord, c, c <> first_value(c) over (partition by run_id order by ord) as moved
from events
where entity = 'param' and op = 'sync' and weights.phase = 'actor' and c is not null;
create or replace temp table reference_pairs as
with pairs as (
    select rid, sum(absdiff_sum) as off, sum(n_in) as tokens, sum(n_equal) as equal, sum(n_in) filter (n_in >= 32) as long
    from pair_cells
    where field = 'ref_log_prob' and against = 'old_log_probs' and n_in > 0
    group by rid
)
select p.*, band(e.run_id) as band,
    e.global_steps = 1 and not exists (
        select 1 from events as o
        where o.op = 'optim_step' and o.run_id is not distinct from e.run_id and o.ord < e.ord
    ) and setting(e.run_id, 'actor_rollout_ref.ref.model.path') is null as fresh,
    coalesce((
        select arg_max(s.moved, s.ord) from actor_syncs as s
        where s.run_id is not distinct from e.run_id and s.ord < e.ord
    ), false)
    -- by less than that a few weights change in their last bits, and no log-prob need show it
    and coalesce((
        select max(o.optim.lr) from events as o
        where o.op = 'optim_step' and o.run_id is not distinct from e.run_id and o.ord < e.ord
    ), 1) >= said('weights.seen_lr') as moved
from pairs as p join events as e using (rid)
where e.stage = 'ref_log_prob';
create or replace temp table copied_rows as
-- of a policy that is certain of its tokens log-probs are 0 whatever its weights
select r.rid, p.id, p.n_in, sum(p.n_in) over (partition by r.rid) as tokens
from reference_pairs as r join pair_cells as p using (rid)
where r.moved and p.n_in > 0 and p.n_equal = p.n_in and (p.n_in >= 32 or (r.equal = r.tokens and r.tokens >= 16))
    and not exists (
        select 1 from token_sum_cells as t
        where t.step_id = p.step_id and t.id = p.id and t.field = 'old_log_probs' and t.sum_in > -0.01 * p.n_in
    );
select rid, null as key, printf('weights %x, as before', before) as expected, printf('%x', c) as actual,
    'the reference has changed' as detail, null as severity
from reference_rows
where c <> before
union all
select rid, keys.key, printf('within %g nats of old_log_probs', band), printf('%.6g', absdiff_sum / n_in),
    'no update has been made', null
from reference_pairs join pair_cells using (rid) join keys using (id)
where fresh and n_in > 0 and off / tokens > band and absdiff_sum / n_in > band
union all
select rid, key, 'another policy than the actor, which has changed', printf('all %d tokens equal bit for bit', n_in),
    'ref_log_prob is old_log_probs', null
from copied_rows join keys using (id)
where n_in >= 32 or tokens >= 16
