-- code: PAD003
-- name: padding does not dilute a mean over rows
-- severity: warning
-- says: The denominator of a loss that is a mean over sequences counts no padding row.
-- needs: loss, is_padding
-- fields: loss
-- examines: select count(*) from events where loss.mode like 'seq-mean%' and step_id in (select step_id from base where is_padding)
-- subsumed_by: PAD001
-- backs_up: LOS001: that holds where the trainer divides by M x G by its own rule, as verl does, and there padding still makes the update smaller
-- source: S5; verl divides by M x G, padding rows included
-- causes: The mean is taken over all rows of the mini-batch, so that padding makes every real row's share, and the learning rate, smaller.
-- faults: mean_over_m_x_g
with minis as (
    select step_id, run_id, process, update_index, mini_batch, ppo_epoch, rid, k, n
    from events
    where stage = 'update_actor' and op = 'split' and micro_batch is null and mini_batch is not null
        and step_id in (select step_id from base where is_padding)
),
counted as (
    select m.rid, count(*) filter (b.is_padding) as padding, count(*) filter (not b.is_padding) as real
    from minis as m join keyed using (k) join base as b using (id)
    group by m.rid
),
terms as (
    select step_id, process, update_index, mini_batch, ppo_epoch, loss.term as term,
        max(loss.denominator) as denominator, arg_min(rid, ord) as rid
    from events
    where loss.mode like 'seq-mean%'
    group by all
)
select t.rid, null as key, printf('at most %d rows', real) as expected, printf('%g', denominator) as actual,
    printf('%s: %d of %d rows are padding', term, padding, padding + real) as detail, null as severity
from terms as t
join minis as m on m.step_id = t.step_id and m.process is not distinct from t.process
    and m.update_index is not distinct from t.update_index and m.mini_batch = t.mini_batch
    and m.ppo_epoch is not distinct from t.ppo_epoch
join counted as c on c.rid = m.rid
where padding > 0 and denominator > real
