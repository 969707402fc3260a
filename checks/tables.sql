-- Where each row of a complete step stands in the whole trace, in the order of events: by the process's own numbering,
-- by clock across processes. A trace judged in slices is placed once, as a whole.
create or replace table places as
select rid,
    dense_rank() over (order by run_id, global_steps) as step_id,
    dense_rank() over (order by run_id, coalesce(partition, '')) as scope,
    row_number() over (order by run_id, case when one then seq else time_ns end, process, seq) as ord
from digest_events, (select count(distinct process) <= 1 as one from digest_events)
where (coalesce(run_id, ''), global_steps) not in (select (run_id, step) from unseen);

create or replace table events as
select e.*, p.step_id, p.scope, p.ord,
    -- of the ranks that hold the same rows the first one
    coalesce(coord.sp, 0) = 0 and coalesce(coord.tp, 0) = 0 and coalesce(coord.pp, 0) = 0 and coalesce(coord.cp, 0) = 0
        as leads
from digest_events as e join places as p using (rid)
order by p.ord;

-- A match without captures, then a split from the right: five times as fast as extracting the groups.
create or replace table keys as
select
    id, key, run, uid,
    -- of its uid, and of itself where it is one; two runs may have the same uids
    case when uid is not null then hash(run, uid) end as group_id,
    hash(run, key) as prompt_id,
    case when uid is not null then try_cast(session as bigint) end as session_id,
    case when uid is not null then try_cast("index" as bigint) end as "index"
from (
    select *, case when whole then left(key, length(key) - length(session) - length("index") - 2) end as uid
    from (
        select id, key, run, split_part(key, '_', -2) as session, split_part(key, '_', -1) as "index",
            regexp_matches(key, '^(.+)_(0|[1-9][0-9]*)_(0|[1-9][0-9]*)$') as whole
        from (select distinct id, key, run from digest_names where key is not null)
    )
);

-- Every trajectory with the content it was first written with.
create or replace table base as
with whose as (
    -- What was said of a key first: a later event that mixes up its tags does not make a real row padding.
    select id, min(step_id) as step_id, coalesce(arg_min(is_padding, ord), false) as is_padding
    from (
        select id, step_id, cast(null as boolean) as is_padding, cast(null as bigint) as ord
        from (select distinct k, step_id from events where said) join keyed using (k)
        union all
        select id, step_id, is_padding, ord from key_cells where is_padding is not null
    )
    group by id
)
select
    id, whose.step_id, whose.is_padding,
    prompts_rid, prompts_valid_length as prompt_len, prompts_fingerprint as prompts_fp,
    responses_rid, responses_valid_length as response_len, responses_fingerprint as responses_fp,
    responses_v as response_v, responses_c as response_c,
    response_mask_rid as mask_rid, response_mask_valid_length as mask_len, response_mask_mask_sum as mask_sum,
    coalesce(response_mask_mask_fingerprint, response_mask_fingerprint) as mask_fp,
    response_mask_fingerprint as mask_content, response_mask_sum as mask_added, response_mask_m as mask_m,
    response_mask_last_nnz as mask_last,
    loss_mask_rid as loss_rid, loss_mask_valid_length as loss_len, loss_mask_mask_sum as loss_sum,
    coalesce(loss_mask_mask_fingerprint, loss_mask_fingerprint) as loss_fp,
    input_ids_rid as ids_rid, input_ids_valid_length as ids_len, input_ids_fingerprint as ids_fp,
    input_ids_v as ids_v, input_ids_c as ids_c,
    attention_mask_rid as attention_rid, attention_mask_valid_length as attention_len,
    attention_mask_fingerprint as attention_fp, attention_mask_c as attention_c,
    position_ids_rid as positions_rid, position_ids_valid_length as positions_len,
    position_ids_fingerprint as positions_fp, position_ids_c as positions_c,
    uid_rid, uid_fingerprint as uid_fp,
    raw_prompt_rid, raw_prompt_fingerprint as raw_prompt_fp,
    rm_scores_rid as reward_rid, rm_scores_sum as reward, rm_scores_fingerprint as reward_fp, rm_scores_c as reward_c,
    num_turns_sum as num_turns,
    coalesce(prompt_len_tag_rid, response_len_tag_rid, seq_len_tag_rid) as tags_rid,
    cast(prompt_len_tag_sum as bigint) as prompt_len_tag,
    cast(response_len_tag_sum as bigint) as response_len_tag,
    cast(seq_len_tag_sum as bigint) as seq_len_tag
from whose left join digest_first using (id);

create or replace table expected as
select
    k,
    count(*) as n,
    cast(sum(coalesce(loss_sum, mask_sum)) as bigint) as loss_tokens,
    count(*) filter (coalesce(loss_sum, mask_sum) > 0) as loss_rows,
    case when count(response_v) = count(*) then cast(sum(response_v) % 18446744073709551616 as ubigint) end as response_v,
    case when count(response_c) = count(*) then cast(sum(response_c) % 18446744073709551616 as ubigint) end as response_c,
    case when count(reward_c) = count(*) then cast(sum(reward_c) % 18446744073709551616 as ubigint) end as reward_c,
    case when count(mask_m) = count(*) then cast(sum(mask_m) % 18446744073709551616 as ubigint) end as mask_m,
    case when count(ids_v) = count(*) then cast(sum(ids_v) % 18446744073709551616 as ubigint) end as ids_v,
    case when count(ids_c) = count(*) then cast(sum(ids_c) % 18446744073709551616 as ubigint) end as ids_c,
    case when count(attention_c) = count(*)
        then cast(sum(attention_c) % 18446744073709551616 as ubigint) end as attention_c,
    case when count(positions_c) = count(*)
        then cast(sum(positions_c) % 18446744073709551616 as ubigint) end as positions_c
from keyed left join base using (id)
where k in (select k from events where entity = 'trajectory')
group by k;

-- Whose tokens a trajectory is made of, as its loop said it: its turns taken together. Fingerprints are of the whole
-- sequence (``fp``) and of the mask its turns make, the prompt's part left out (``mask_fp``).
create or replace table ribbons as
select
    id, rid, any_value(step_id) as step_id, any_value(ord) as ord,
    sum(valid_length) as seq_len,
    coalesce(sum(valid_length) filter (role = 'prompt'), 0) as prompt_len,
    coalesce(sum(valid_length) filter (role = 'policy'), 0) as policy_len,
    count(*) filter (role = 'policy') as policy_turns,
    max("start" + valid_length) filter (role = 'policy') as policy_end,
    sum(generated) filter (role = 'policy') as generated,
    count(generated) filter (role = 'policy') as counted,
    coalesce(sum(greatest(truncated_from - valid_length, 0)) filter (role = 'policy'), 0)
        + coalesce(sum(trimmed) filter (role = 'policy'), 0) as cut,
    count(trimmed) as trims,
    cast(sum(compose(0, "start", fingerprint)) % 18446744073709551616 as ubigint) as fp,
    cast(coalesce(sum(compose(0, "start", repeated(case when role = 'policy' then 1 else 0 end, valid_length)))
        filter (role <> 'prompt'), 0) % 18446744073709551616 as ubigint) as mask_fp
from turn_cells
group by id, rid;

-- Every request of the engine, with the place it was for: its session, or of engines that number theirs otherwise its step.
create or replace table engine_answers as
select
    r.rid, r.step_id, r.ord, keys."index" as number,
    case when known.group_id is null then hash(r.step_id) else hash(keys.group_id, keys.session_id) end as place,
    p.rid as prompt_rid, p.valid_length as prompt_len, p.fingerprint as prompt_fp,
    r.valid_length as answer_len, r.fingerprint as answer_fp, r.generated, r.finish_reason, r.truncated_from
from request_cells as r
join keys using (id)
left join (select distinct group_id from base join keys using (id)) as known on known.group_id = keys.group_id
left join request_cells as p on p.id = r.id and p.step_id = r.step_id and p.field = 'prompts'
where r.field = 'responses';

-- The trajectories each step was given to train on, padding rows among them; those it began where no list says so.
create or replace table given as
with handed as (
    select distinct step_id, id from key_cells
    where field = 'key' and partition is distinct from 'val' and ((op = 'produce' and stage = 'sample') or op = 'pad')
)
select h.step_id, id, b.is_padding, b.reward, b.response_len, b.prompt_len, b.num_turns
from handed as h join base as b using (id)
union all
select b.step_id, id, b.is_padding, b.reward, b.response_len, b.prompt_len, b.num_turns
from base as b
where b.step_id not in (select step_id from handed)
    and b.responses_rid not in (select rid from events where partition = 'val');

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
rows_of as materialized (
    select step_id, is_padding, unnest([
        {'name': 'critic/score', 'value': reward},
        {'name': 'response_length', 'value': cast(response_len as double)},
        {'name': 'prompt_length', 'value': cast(prompt_len as double)},
        {'name': 'num_turns', 'value': num_turns},
        {'name': 'global_seqlen', 'value': cast(prompt_len + response_len as double)}
    ], recursive := true)
    from given
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
drifts as (
    -- the mean log ratio of every optimiser step, over its tokens
    select n.step_id, e.update_index, bool_and(n.mask_sum = o.mask_sum) as comparable,
        sum(o.sum_in - n.sum_in) / nullif(sum(n.mask_sum), 0) as kl
    from token_sum_cells as n join events as e using (rid) join means as o on o.step_id = n.step_id and o.id = n.id
    where n.field = 'log_probs' and n.op = 'forward' and o.field = 'old_log_probs'
    group by n.step_id, e.update_index
),
answers as (
    select c.step_id, k.group_id, arg_max(b.reward, k."index") as reward
    from key_cells as c join keys as k using (id) join base as b using (id)
    where c.field = 'key' and c.op = 'produce' and c.stage = 'sample' and c.partition = 'val'
    group by c.step_id, k.group_id, k.session_id
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
    select step_id, name || '/clip_ratio', avg(cast(value >= most as integer)) filter (not is_padding),
        avg(cast(value >= most as integer))
    from (
        select step_id, is_padding, name, value, case name when 'response_length' then response else prompt end as most
        from rows_of join steps using (step_id)
        where name in ('response_length', 'prompt_length')
    )
    where most is not null
    group by step_id, name
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

-- Where to point when a key itself is at fault: where its list was first written, else where it was first seen. (A
-- scorer inside the agent loop sees a key before the queue does, but does not make it.)
create or replace table firsts as
select k, entity, partition, min(late) as late, arg_min(ord, late) as ord, arg_min(rid, late) as rid
from (
    select k, entity, partition, rid, ord, ord + case when op in ('produce', 'tag') then 0 else 1000000000000 end as late
    from events
    where k is not null and entity in ('trajectory', 'prompt')
)
group by k, entity, partition;

-- Sessions of several outputs, with the number of the last one. (The id of a request may look like a key.)
create or replace table last_outputs as
select group_id, session_id, max("index") as last from keys join base using (id) where "index" > 0 group by all;

-- Advantages and returns as they were computed, each with its group; ``final``: of the last output of its session.
create or replace table grouped as
select a.rid, a.ord, a.step_id, a.field, a.id, a.mask_sum, a.min_in, a.max_in, k.group_id, k.session_id, k."index",
    k."index" = coalesce(l.last, 0) as final, b.is_padding, b.reward
from advantage_cells as a
join keys as k using (id)
join base as b using (id)
left join last_outputs as l on l.group_id = k.group_id and l.session_id = k.session_id
where a.stage = 'advantage' and k.group_id is not null;

-- What a step's estimator is declared to be, where the run says it: ``grpo``, and whether by the group's deviation;
-- ``outcome``: of one score a session.
create or replace table estimators as
select distinct step_id, estimator, norm in ('true', 'group') as by_std,
    estimator = 'grpo' and norm in ('true', 'false', 'group', 'none') and aggregation <> 'normalize_then_sum' as grpo,
    estimator in ('grpo', 'grpo_passk', 'grpo_vectorized', 'rloo', 'rloo_vectorized', 'opo', 'gpg') as outcome
from (
    select run_id, coalesce(estimator, case when scale is not null then 'grpo' end) as estimator,
        coalesce(norm, scale) as norm, coalesce(aggregation, '') as aggregation
    from (
        select run_id, setting(run_id, 'algorithm.adv_estimator') as estimator,
            setting(run_id, 'algorithm.norm_adv_by_std_in_grpo') as norm, setting(run_id, 'scale_rewards') as scale,
            setting(run_id, 'multi_objective_aggregation') as aggregation
        from (select distinct run_id from events)
    )
) as declared
join (select distinct run_id, step_id from events where field = 'advantages' and op = 'forward') as e
    on e.run_id is not distinct from declared.run_id
where estimator is not null;

-- The prompts of each step: how many sessions each declares, whether it ``failed`` or was left out for a reason, and
-- whether it was ``selected`` to train on, with the row that says so.
create or replace table prompt_groups as
select step_id, any_value(k.prompt_id) as group_id, id, max(expected) as expected,
    bool_or(status = 'failure' or reason is not null) as failed,
    bool_or(stage = 'sample' and op = 'filter' and reason is null) as selected,
    max(rid) filter (stage = 'sample' and op = 'filter') as rid
from group_cells join keys as k using (id)
where entity = 'prompt'
group by step_id, id;

-- Old log-probs beside the sampler's where the two are of one distribution: the actor's weights of the step, and no token
-- left out (of a validation the sampler may leave out what it likes).
create or replace table sampler_pairs as
with cut_support as (
    select distinct run_id
    from events
    where op = 'generate' and stage = 'rollout' and partition is distinct from 'val' and sampling is not null
        and (sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0 or sampling.repetition_penalty <> 1
            or (sampling.logprobs_mode like 'raw%' and sampling.temperature <> 1))
),
scored as (
    select run_id, global_steps, k, ord, weights.version as version
    from events
    where stage = 'old_log_prob' and op = 'forward' and field = 'log_probs' and weights is not null
),
on_policy as (
    select distinct e.rid, band(e.run_id) as band
    from events as e
    left join scored as s
        on s.run_id is not distinct from e.run_id and s.global_steps = e.global_steps and s.k = e.k and s.ord < e.ord
    where e.op = 'compare' and e.field = 'old_log_probs' and e.against = 'rollout_log_probs'
        and e.partition is distinct from 'val'
        and not exists (select 1 from cut_support as c where c.run_id is not distinct from e.run_id)
        and coalesce(setting(e.run_id, 'actor_rollout_ref.rollout.top_p'), '1.0') in ('1', '1.0')
        and coalesce(setting(e.run_id, 'actor_rollout_ref.rollout.top_k'), '-1') in ('0', '-1')
        and coalesce(s.version, e.global_steps - 1) = e.global_steps - 1
),
aged as (
    select c.id
    from key_cells as c join events as e using (rid)
    where c.max_global_steps <> e.global_steps - 1 or c.min_global_steps <> e.global_steps - 1
)
select p.rid, p.id, o.band, p.absdiff_sum, p.n_in, p.absdiff_sum / p.n_in as off
from pair_cells as p join on_policy as o using (rid)
where p.n_in > 0 and p.id not in (select id from aged);

-- The optimiser steps of each batch a step trains on, as its mini-batches say it; a step may train on several batches.
create or replace table update_batches as
select run_id, global_steps, update_index,
    max(coalesce(try_cast(attrs['first_update'] as bigint), 0)) as first_update,
    max(coalesce(try_cast(attrs['trajectories'] as double), 1)) as trajectories
from events
where stage = 'update_actor' and op = 'split' and micro_batch is null
group by run_id, global_steps, update_index;

-- Scores that are not what the scorer gave, each with what it gave; ``moved``: the step's are all there, under other keys.
create or replace table changed_scores as
with scored as (
    select rid, step_id, id, stage, "sum" as score from reward_cells
    where field = 'rm_scores' and op = 'score' and isfinite("sum")
),
written as (
    select rid, step_id, id, "sum" as actual from reward_cells
    where field = 'rm_scores' and op = 'produce' and stage in ('rollout', 'reward') and entity = 'trajectory'
        and isfinite("sum")
),
pairs as (
    select w.rid, w.step_id, w.id, w.actual, s.score, 'as the scorer said' as detail
    from written as w join scored as s using (step_id, id)
    union all
    -- an output that was not scored itself carries what its session's last output was given
    select w.rid, w.step_id, w.id, w.actual, s.score, 'as the scorer said of the last output of the session'
    from written as w
    join keys as k using (id)
    join last_outputs as l on l.group_id = k.group_id and l.session_id = k.session_id and l.last > k."index"
    join keys as f on f.group_id = l.group_id and f.session_id = l.session_id and f."index" = l.last
    join scored as s on s.id = f.id and s.step_id = w.step_id
    where w.id not in (select id from reward_cells where op = 'score' and field = 'rm_scores')
    union all
    select s.rid, s.step_id, s.id, s.score, b."sum", 'as the scorer said beside it'
    from scored as s join reward_cells as b using (step_id, id)
    where s.stage = 'reward' and b.stage = 'reward' and b.field = 'score' and b.op = 'produce' and isfinite(b."sum")
),
changed as materialized (
    -- a scorer says float64, the field holds float32
    select * from pairs where abs(actual - score) > 6e-8 * abs(score) + 1e-45
),
steps as (
    select step_id, list_sort(list(printf('%.6g', actual))) = list_sort(list(printf('%.6g', score))) as moved
    from changed
    group by step_id
)
select c.*, s.moved from changed as c join steps as s using (step_id);
