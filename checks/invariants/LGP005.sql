-- code: LGP005
-- name: drawn and scored as configured
-- severity: error
-- says: Tokens are drawn as rollout is configured, those of a validation as its val_kwargs (temperature, top_p, top_k, do_sample), and none is drawn from outside the top_k, the nucleus or the greedy choice; every log-prob and entropy of a training batch is of the temperature its tokens were drawn at; old and reference log-probs are made in eval mode. What an agent loop of the user's own sampled_draws otherwise is a warning.
-- needs: sampling
-- fields:
-- examines: select sum(n) from events where sampling is not null and ((op = 'forward' and field in ('log_probs', 'entropy') and entity = 'trajectory') or (op = 'generate' and stage = 'rollout' and (field like 'likelier%' or setting(run_id, 'actor_rollout_ref.rollout.temperature') is not null)))
-- subsumed_by:
-- source: TRL and verl divide logits by the sampling temperature before every log-prob; verl's agent loops replace rollout's parameters by val_kwargs
-- causes: One producer reads another setting than the sampler, or none; a validation was asked with the parameters of the training, or the engine ignores one; the module was left in training mode by the update.
-- reports: THUDM/slime#2085, huggingface/trl#3029, verl-project/verl#3133, verl-project/verl#4708
-- faults: greedy_is_lost_on_the_way, old_log_probs_without_temperature, reference_at_another_temperature, scored_in_training_mode, the_engines_own_defaults, the_nucleus_has_no_effect, top_k_has_no_effect, update_without_temperature, validation_samples_like_training
create or replace temp table sampled_draws as
select e.rid, e.run_id, coalesce(e.partition, '') = 'val' as val, e.field, e.high,
    e.sampling.temperature as temperature, e.sampling.top_p as top_p,
    case when e.sampling.top_k > 0 then e.sampling.top_k when e.sampling.top_k is not null then 0 end as top_k,
    not e.sampling.do_sample or e.sampling.temperature = 0 as greedy
from events as e
where e.op = 'generate' and e.stage = 'rollout' and e.sampling is not null and e.n > 0;
create or replace temp table configured as
with sections as (
    select run_id, val, 'actor_rollout_ref.rollout.' || case when val then 'val_kwargs.' else '' end as section
    from (select distinct run_id, val from sampled_draws)
)
select run_id, val, rtrim(section, '.') as section,
    try_cast(setting(run_id, section || 'temperature') as double) as temperature,
    coalesce(try_cast(setting(run_id, section || 'top_p') as double), 1) as top_p,
    greatest(coalesce(try_cast(setting(run_id, section || 'top_k') as bigint), 0), 0) as top_k,
    coalesce(setting(run_id, section || 'do_sample'), 'true') = 'false'
        or try_cast(setting(run_id, section || 'temperature') as double) = 0 as greedy,
    -- its baseline is a greedy answer
    coalesce(setting(run_id, 'algorithm.adv_estimator'), '') = 'remax' as remax,
    coalesce(setting(run_id, 'actor_rollout_ref.rollout.agent.agent_loop_config_path'), '') = ''
        and coalesce(setting(run_id, 'actor_rollout_ref.rollout.agent.default_agent_loop'), 'single_turn_agent')
            in ('single_turn_agent', 'tool_agent')
        and not exists (
            select 1 from events as e
            where e.stage = 'dataset' and e.run_id is not distinct from sections.run_id
                and not list_has_all(['single_turn_agent', 'tool_agent'], string_split(e.attrs['agent_name'], ','))
        ) as own
from sections;
create or replace temp table outside_support as
select rid, val, case when greedy then 1 when field = 'likelier' then top_k else top_p + 1e-4 end as bound, greedy, field,
    top_k, top_p
from sampled_draws
where (field = 'likelier' and high >= case when greedy then 1 else nullif(top_k, 0) end)
    or (field = 'likelier_mass' and not greedy and top_p < 1 and high >= top_p + 1e-4);
insert into suspects
select rid from outside_support;
with drawn as (
    select run_id, min(sampling.temperature) as temperature
    from events
    where op = 'generate' and stage = 'rollout' and sampling is not null and sampling.do_sample
        and partition is distinct from 'val'
    group by run_id
    -- a loop that sampled_draws at several temperatures says nothing of a whole batch
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
union all
select d.rid, null,
    case when c.greedy then 'greedy' else printf('temperature %g, top_p %g, ', c.temperature, c.top_p)
        || case when c.top_k > 0 then printf('top_k %d', c.top_k) else 'no top_k' end end || ', as ' || c.section,
    case when d.greedy then 'greedy' else printf('temperature %g', d.temperature) || coalesce(printf(', top_p %g', d.top_p), '')
        || case when d.top_k > 0 then printf(', top_k %d', d.top_k) when d.top_k = 0 then ', no top_k' else '' end end,
    case when d.val then 'drawn in validation' else 'drawn in training' end, case when not c.own then 'warning' end
from sampled_draws as d join configured as c on c.run_id is not distinct from d.run_id and c.val = d.val
where d.field = 'responses' and c.temperature is not null
    -- the one most probable token, however it is said
    and not ((d.greedy or coalesce(d.top_k = 1, false)) and (c.greedy or c.top_k = 1 or (c.remax and not d.val)))
    and (d.greedy <> c.greedy or abs(d.temperature - c.temperature) > 1e-6 or abs(d.top_p - c.top_p) > 1e-6 or d.top_k <> c.top_k)
union all
select o.rid, e.key,
    case when o.greedy then 'the likeliest token' when o.field = 'likelier' then printf('one of the top_k %d', o.top_k)
        else printf('one of the nucleus of %g', o.top_p) end,
    case when o.greedy then 'another' when o.field = 'likelier' then printf('one with %d likelier', cast(e.max_in as bigint))
        else printf('one with %.6g of the probability likelier', e.max_in) end,
    case when o.val then 'drawn in validation' else 'drawn in training' end, null
from outside_support as o join elements as e using (rid)
where e.max_in >= o.bound
