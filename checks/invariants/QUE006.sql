-- code: QUE006
-- name: what is computed is used
-- severity: warning
-- says: Every field of the algorithm that a step produces has a consumer in it, and every field the configuration asks for is produced: advantages, old_log_probs and, where they are switched on, ref_log_prob and rollout_is_weights reach the update, rm_scores and the reference of a KL in the reward reach the advantage.
-- needs: producer
-- fields: advantages
-- examines: select count(*) from events where queue and op = 'produce' and entity = 'trajectory' and n > 0 and field in ('advantages', 'old_log_probs', 'ref_log_prob', 'rollout_is_weights', 'rm_scores') and partition is distinct from 'val'
-- subsumed_by:
-- source: verl reads use_kl_loss, use_kl_in_reward and rollout_is where the field is used, not where it is made
-- causes: A switch is read in the stage that computes the field and not in the one that uses it: the forward pass is paid for, and its result is dropped.
-- faults: importance_weights_are_not_read
create or replace temp table uses as
select * from (values
    ('advantages', 'update_actor', null, null),
    ('old_log_probs', 'update_actor', null, null),
    ('rm_scores', 'advantage', null, null),
    ('ref_log_prob', 'update_actor', 'actor_rollout_ref.actor.use_kl_loss', 'true'),
    ('ref_log_prob', 'advantage', 'algorithm.use_kl_in_reward', 'true'),
    ('rollout_is_weights', 'update_actor', 'algorithm.rollout_correction.rollout_is', null)
) as t(field, stage, switch, position);
create or replace temp table updated_steps as
select step_id, run_id, arg_min(rid, ord) as rid
from events
where stage = 'update_actor'
group by all
having bool_or(op = 'optim_step');
create or replace temp table produced_fields as
select e.step_id, e.field, max_by(e.rid, e.ord) as rid
from events as e join updated_steps using (step_id)
where e.queue and e.op = 'produce' and e.entity = 'trajectory' and e.n > 0 and e.partition is distinct from 'val'
    and e.field in (select field from uses)
group by all;
create or replace temp table read_fields as
select distinct step_id, field, stage
from events
where op in ('consume', 'pad') and entity = 'trajectory' and n > 0 and field in (select field from uses);
with switched as (
    select distinct run_id, u.switch,
        case
            when u.switch is null then true
            when u.position is not null then setting(run_id, u.switch) = u.position
            else coalesce(setting(run_id, u.switch), 'null') not in ('null', 'false', '')
                and setting(run_id, 'algorithm.rollout_correction.bypass_mode') is distinct from 'true'
        end as is_on
    from uses as u, (select distinct run_id from updated_steps)
),
wanted as (
    select s.step_id, s.run_id, s.rid as step_rid, u.field, u.stage, u.switch
    from updated_steps as s, uses as u
    join switched as w on w.switch is not distinct from u.switch and w.run_id is not distinct from s.run_id
    where w.is_on
)
select coalesce(p.rid, w.step_rid) as rid, null as key, w.field || ' read by ' || w.stage as expected,
    case when p.rid is null then 'never produced' else 'produced, and not read there' end as actual,
    coalesce(w.switch, 'every step needs it') as detail, null as severity
from wanted as w
left join produced_fields as p on p.step_id = w.step_id and p.field = w.field
left join read_fields as r on r.step_id = w.step_id and r.field = w.field and r.stage = w.stage
where r.step_id is null and (p.rid is not null or (
    w.switch is not null and exists (select 1 from produced_fields as any_one where any_one.step_id = w.step_id)
))
union all
select p.rid, null, p.field || ' read by somebody', 'nobody reads it', 'computed for nothing', null
from produced_fields as p
where not exists (select 1 from read_fields as r where r.step_id = p.step_id and r.field = p.field)
    and not exists (select 1 from wanted as w where w.step_id = p.step_id and w.field = p.field)
