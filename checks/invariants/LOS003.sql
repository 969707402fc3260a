-- code: LOS003
-- name: the update begins where it was measured
-- severity: error
-- says: In normal mode the log-probs of a batch's first update are the old ones within the band; loss and gradient norm are finite; every mini-batch reports its optimiser step, and one that was skipped is reported as skipped.
-- needs: optim
-- fields: grad_norm
-- examines: select count(*) from events where op = 'optim_step'
-- subsumed_by: LGP001, LGP002, LGP003, LGP004, LGP005, LGP008, LGP009, LEN004, QUE003, VER004, LOS001, KEY003, VAL001
-- source: PPO (arXiv:1707.06347): the first ratio is 1; verl skips a step whose gradient is not finite
-- causes: The update scores under other conditions than the old log-probs were made under (dropout, temperature, positions, autocast), or a bad gradient was stepped on, or dropped without a word.
-- faults: skipped_steps_are_not_counted, skipped_without_a_word, update_under_autocast
create or replace temp table first_pairs as
select e.rid, band(e.run_id) as band, sum(p.absdiff_sum) as off, sum(p.n_in) as tokens
from events as e
join update_batches as f
    on f.run_id is not distinct from e.run_id and f.global_steps = e.global_steps and f.update_index = e.update_index
join pair_cells as p using (rid)
where e.op = 'compare' and e.stage = 'update_actor' and e.field = 'log_probs' and e.against = 'old_log_probs'
    and e.update_index = f.first_update and p.n_in > 0
    and coalesce(setting(e.run_id, 'algorithm.rollout_correction.bypass_mode'), 'false') <> 'true'
group by e.rid, band(e.run_id);
with steps as (
    select run_id, global_steps, count(*) filter (optim.skipped) as skipped, max(rid) as rid
    from events
    where op = 'optim_step'
    group by run_id, global_steps
),
said_of as (
    select e.run_id, e.global_steps, c.rid, c."sum" as skipped
    from group_cells as c join keys using (id) join events as e on e.rid = c.rid
    where c.field = 'metrics' and keys.key = 'actor/skipped_steps'
)
select f.rid, keys.key, printf('within %g nats of old_log_probs', f.band) as expected,
    printf('%.6g', p.absdiff_sum / p.n_in) as actual, printf('mean over the micro-batch %.6g', f.off / f.tokens) as detail,
    null as severity
from first_pairs as f join pair_cells as p using (rid) join keys using (id)
where p.n_in > 0 and ((f.off / f.tokens > f.band and p.absdiff_sum / p.n_in > f.band)
    or (p.absdiff_sum / p.n_in > 10 * f.band and p.n_in >= 4))
union all
select rid, 'grad_norm', 'finite, or the step skipped', printf('%g', optim.grad_norm), null, null
from events
where op = 'optim_step' and not isfinite(optim.grad_norm) and not coalesce(optim.skipped, false)
union all
select rid, loss.term, 'finite', printf('%g', loss.numerator), null, null
from events
where loss is not null and not isfinite(loss.numerator)
union all
select s.rid, null, 'an optimiser step', 'none', printf('mini-batch %d', s.mini_batch), null
from events as s
where s.stage = 'update_actor' and s.op = 'split' and s.micro_batch is null and s.update_index is not null
    and not exists (
        select 1 from events as o
        where o.op = 'optim_step' and o.run_id is not distinct from s.run_id and o.global_steps = s.global_steps
            and o.update_index = s.update_index
    )
    and exists (select 1 from events as o where o.op = 'optim_step' and o.run_id is not distinct from s.run_id)
union all
select said_of.rid, 'actor/skipped_steps', printf('%d', steps.skipped), printf('%g', said_of.skipped), 'by the steps themselves', null
from said_of
join steps on steps.run_id is not distinct from said_of.run_id and steps.global_steps = said_of.global_steps
where said_of.skipped <> steps.skipped
