-- The metrics of each step that follow from its rows: as logged, over real rows, and over the padding rows as well.
create or replace table measured as
with logged as materialized (
    select c.rid, c.step_id, c.ord, e.run_id, k.key as name, c."sum" as value
    from group_cells as c join keys as k using (id) join events as e using (rid)
    where c.field = 'metrics' and c.entity = 'metric'
),
sampled as (
    select step_id, count(*) as batches from events
    where op = 'produce' and stage = 'sample' and field = 'key' and partition is distinct from 'val'
    group by step_id
),
limits as (
    select run_id, max(try_cast(value as bigint)) filter (name = 'data.max_prompt_length') as prompt,
        coalesce(max(try_cast(value as bigint)) filter (name = 'actor_rollout_ref.rollout.response_length'),
            max(try_cast(value as bigint)) filter (name = 'data.max_response_length')) as response,
        max(value) filter (name = 'actor_rollout_ref.actor.loss_agg_mode') as mode
    from config
    group by run_id
),
steps as materialized (
    select l.step_id, l.ord, prompt, response, mode, coalesce(s.batches, 1) = 1 as whole
    from (select step_id, run_id, max(ord) as ord from logged group by all) as l left join limits on limits.run_id = coalesce(l.run_id, '')
        left join sampled as s using (step_id)
),
rows_of as (
    select step_id, is_padding, 'critic/score' as name, reward as value from given
    union all
    select step_id, is_padding, 'response_length', cast(response_len as double) from given
    union all
    select step_id, is_padding, 'prompt_length', cast(prompt_len as double) from given
    union all
    select step_id, is_padding, 'num_turns', num_turns from given
    union all
    select step_id, is_padding, 'global_seqlen', cast(prompt_len + response_len as double) from given
    union all
    select r.step_id, is_padding, 'critic/rewards', "sum"
    from reward_cells as r join given using (step_id, id)
    where field = 'token_level_rewards' and op = 'forward'
    union all
    select a.step_id, is_padding, 'policy_length', cast(mask_sum as double)
    from advantage_cells as a join given using (step_id, id)
    where field = 'advantages' and stage = 'advantage' and mask_sum is not null
),
spread as materialized (
    select step_id, name, avg(value) filter (not is_padding) as mean, max(value) filter (not is_padding) as high,
        min(value) filter (not is_padding) as low, avg(value) as mean_all, max(value) as high_all, min(value) as low_all,
        sum(value) filter (not is_padding) as total, sum(value) as total_all
    from rows_of
    where value is not null
    group by step_id, name
),
tokens as (
    select a.step_id, 'critic/' || field as name,
        sum(sum_in) filter (not is_padding) / nullif(sum(mask_sum) filter (not is_padding), 0) as mean,
        max(max_in) filter (not is_padding) as high, min(min_in) filter (not is_padding) as low,
        sum(sum_in) / nullif(sum(mask_sum), 0) as mean_all, max(max_in) as high_all, min(min_in) as low_all
    from advantage_cells as a join given using (step_id, id)
    where stage = 'advantage' and mask_sum is not null
    group by a.step_id, field
),
means as materialized (
    -- what the driver scored, row by row: only rows that train have a mean, padding counts 0 where it is counted
    select t.step_id, t.id, field, is_padding, mask_sum, sum_in, sum_in / nullif(mask_sum, 0) as mean
    from token_sum_cells as t join given using (step_id, id) join steps using (step_id)
    where op = 'produce' and mask_sum is not null and whole and t.ord < steps.ord -- what is written later is in no metric
),
entropies as (
    select step_id, 'actor/entropy' as name,
        case mode when 'seq-mean-token-mean' then avg(mean) filter (mask_sum > 0)
            when 'seq-mean-token-sum' then avg(sum_in) filter (mask_sum > 0)
            else sum(sum_in) / nullif(sum(mask_sum), 0) end as value,
        case when not bool_or(is_padding) then null
            when mode = 'seq-mean-token-mean' then avg(coalesce(mean, 0))
            when mode = 'seq-mean-token-sum' then avg(sum_in) end as over_all
    from means join steps using (step_id)
    where field = 'entropy'
    group by step_id, mode
),
pairs as materialized (
    select step_id, o.is_padding, o.mask_sum, o.sum_in as trained, r.sum_in as rolled, o.mean as trained_mean,
        r.mean as rolled_mean, o.id
    from means as o join means as r using (step_id, id)
    where o.field = 'old_log_probs' and r.field = 'rollout_log_probs' and o.mask_sum = r.mask_sum
),
perplexities as (
    select step_id, unnest([
        {'name': 'rollout_corr/kl', 'value': kl, 'over_all': null},
        {'name': 'rollout_corr/training_log_ppl', 'value': trained_mean, 'over_all': trained_all},
        {'name': 'rollout_corr/rollout_log_ppl', 'value': rolled_mean, 'over_all': rolled_all},
        {'name': 'rollout_corr/training_ppl', 'value': trained_ppl, 'over_all': trained_ppl_all},
        {'name': 'rollout_corr/rollout_ppl', 'value': rolled_ppl, 'over_all': rolled_ppl_all}
    ], recursive := true)
    from (
        select step_id, sum(rolled - trained) / nullif(sum(mask_sum), 0) as kl,
            avg(-trained_mean) as trained_mean, avg(-coalesce(trained_mean, 0)) as trained_all,
            avg(-rolled_mean) as rolled_mean, avg(-coalesce(rolled_mean, 0)) as rolled_all,
            avg(exp(-trained_mean)) as trained_ppl, avg(exp(-coalesce(trained_mean, 0))) as trained_ppl_all,
            avg(exp(-rolled_mean)) as rolled_ppl, avg(exp(-coalesce(rolled_mean, 0))) as rolled_ppl_all
        from pairs
        group by step_id
    )
),
cut_drifts as (
    -- Steps in which a token's log ratio passes 20, where the loss cuts it: what the totals give is then another number.
    -- Without the two sides held against each other, steps in which one of them is that low.
    select step_id from pair_cells where field = 'log_probs' and against = 'old_log_probs' and absdiff_max > 20
    union
    select step_id from events
    where field in ('log_probs', 'old_log_probs') and op in ('forward', 'produce') and entity = 'trajectory' and low < -20
        and step_id not in (select step_id from pair_cells where field = 'log_probs' and against = 'old_log_probs')
),
drifts as (
    -- the mean log ratio of every optimiser step, over its tokens
    select n.step_id, e.update_index, bool_and(n.mask_sum = o.mask_sum) as comparable,
        sum(o.sum_in - n.sum_in) / nullif(sum(n.mask_sum), 0) as kl
    from token_sum_cells as n join events as e using (rid) join means as o on o.step_id = n.step_id and o.id = n.id
    where n.field = 'log_probs' and n.op = 'forward' and o.field = 'old_log_probs'
        and n.step_id not in (select step_id from cut_drifts)
    group by n.step_id, e.update_index
),
answers as (
    select c.step_id, b.group_id, arg_max(b.reward, b."index") as reward
    from key_cells as c join base as b using (id)
    where c.field = 'key' and c.op = 'produce' and c.stage = 'sample' and c.partition = 'val'
    group by c.step_id, b.group_id, b.session_id
),
asked_of as materialized (
    select step_id, k.prompt_id as group_id, any_value(data_source) as source
    from group_cells join keys as k using (id)
    where entity = 'prompt' and partition = 'val' and data_source is not null
    group by all
),
validations as materialized (
    select step_id, source, answered, avg(mean) as value
    from (
        select step_id, source, group_id, count(*) as answered, avg(reward) as mean
        from answers join asked_of using (step_id, group_id)
        group by all
        having count(reward) = count(*)
    )
    group by step_id, source, answered
),
followed as (
    select step_id, unnest([
        {'name': name || '/mean', 'value': mean, 'over_all': mean_all},
        {'name': name || '/max', 'value': high, 'over_all': high_all},
        {'name': name || '/min', 'value': low, 'over_all': low_all}
    ], recursive := true)
    from (
        select step_id, name, mean, high, low, mean_all, high_all, low_all from spread
        where name <> 'global_seqlen' or said('metrics.seqlen_of_rows') = 1
        union all
        select * from tokens
    )
    union all
    select step_id, 'perf/total_num_tokens', total, total_all from spread where name = 'global_seqlen'
    union all
    select step_id, 'response_length/clip_ratio', avg(cast(response_len >= response as integer)) filter (not is_padding),
        avg(cast(response_len >= response as integer))
    from given join steps using (step_id)
    where response is not null
    group by step_id
    union all
    select step_id, 'prompt_length/clip_ratio', avg(cast(given.prompt_len >= prompt as integer)) filter (not is_padding),
        avg(cast(given.prompt_len >= prompt as integer))
    from given join steps using (step_id)
    where prompt is not null
    group by step_id
    union all
    select * from entropies
    union all
    select * from perplexities
    union all
    select step_id, 'actor/ppo_kl', avg(kl), null from drifts group by step_id having bool_and(comparable)
    union all
    select step_id, printf('val-%s/%s/reward/mean@%d', section, source, answered), value, null
    from validations, (values ('core'), ('aux')) as sections(section)
)
select l.rid, l.step_id, l.name, l.value, f.value as over_real, f.over_all,
    abs(l.value - f.value) > m.margin or isnan(l.value) <> isnan(f.value) as wrong,
    coalesce(f.over_all is distinct from f.value and abs(l.value - f.over_all) <= m.margin, false) as with_padding
from logged as l join followed as f using (step_id, name),
    lateral (select said('metrics.absolute') + said('metrics.relative') * abs(f.value) as margin) as m
where f.value is not null
union all
-- what a validation says of its answers is said of as many answers as there were
select l.rid, v.step_id, printf('val-core/%s/reward/mean@%d', source, answered), null, v.value, null, true, false
from validations as v
join (select step_id, min(rid) as rid from logged where starts_with(name, 'val-') group by step_id) as l using (step_id)
where (v.step_id, printf('val-core/%s/reward/mean@%d', source, answered)) not in (select (step_id, name) from logged)
    and (v.step_id, printf('val-aux/%s/reward/mean@%d', source, answered)) not in (select (step_id, name) from logged);
