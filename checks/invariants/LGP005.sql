-- code: LGP005
-- name: one temperature, eval mode
-- severity: error
-- says: Every log-prob and entropy of a training batch is of the temperature its tokens were drawn at; old and reference log-probs are made in eval mode.
-- needs: sampling
-- fields: log_probs
-- examines: select sum(n) from events where op = 'forward' and field in ('log_probs', 'entropy') and entity = 'trajectory' and sampling is not null
-- subsumed_by:
-- source: TRL and verl divide logits by the sampling temperature before every log-prob
-- causes: One producer reads another setting than the sampler, or none; the module was left in training mode by the update.
-- reports: THUDM/slime#2085, huggingface/trl#3029, verl-project/verl#3133, verl-project/verl#4708
-- faults: old_log_probs_without_temperature, reference_at_another_temperature, scored_in_training_mode, update_without_temperature
with drawn as (
    select run_id, min(sampling.temperature) as temperature
    from events
    where op = 'generate' and stage = 'rollout' and sampling is not null and sampling.do_sample
        and partition is distinct from 'val'
    group by run_id
    -- a loop that draws at several temperatures says nothing of a whole batch
    having count(distinct sampling.temperature) = 1
)
select f.rid, null as key, printf('temperature %g, the sampler''s', d.temperature) as expected,
    printf('temperature %g', f.sampling.temperature) as actual, null as detail, null as severity
from events as f join drawn as d on d.run_id is not distinct from f.run_id
where f.op = 'forward' and f.field in ('log_probs', 'entropy') and f.entity = 'trajectory'
    and abs(f.sampling.temperature - d.temperature) > 1e-6
union all
select rid, null, 'eval mode', 'training mode', 'weights of the ' || weights.phase, null
from events
where op = 'forward' and field in ('log_probs', 'entropy') and entity = 'trajectory'
    and stage in ('old_log_prob', 'ref_log_prob') and weights.training
